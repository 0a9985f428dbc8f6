"""The run registry: tickets within the window, leases, waiting with a reason, metrics, watching."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envfarm.core.errors import ConfigError, EnvironmentCodeError
from envfarm.core.ids import derived_seed
from envfarm.core.log import LogRecord
from envfarm.core.outcome import Outcome
from envfarm.core.rewards import RewardSettings
from envfarm.core.run import MetricPoint, RunSettings, RunState
from envfarm.core.task import Task
from envfarm.core.trajectory import TrajectoryHeader
from envfarm.runs import metrics
from envfarm.runs.registry import RunRegistry
from envfarm.trajectories.sqlite_log import SqliteLog

SETTINGS = RunSettings(environment="shop", seed=7, group_size=2, groups_per_version=4, staleness=1)


class Shelf:
    """A task source with a list; counts what it is asked."""

    def __init__(self, length: int | None = None) -> None:
        self.length = length
        self.asked: list[tuple[int, int]] = []

    async def tasks(self, environment: str, split: str, offset: int, limit: int) -> list[Task]:
        self.asked.append((offset, limit))
        end = offset + limit if self.length is None else min(self.length, offset + limit)
        return [Task(id=f"{split}-{i}") for i in range(offset, end)]


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def log(tmp_path, clock):
    log = SqliteLog(tmp_path / "farm.db", clock=clock)
    yield log
    await log.close()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def registry(tmp_path, clock):
    registry = RunRegistry(tmp_path / "farm.db", Shelf(), clock=clock)
    yield registry
    await registry.close()


def record(run_id: str, index: int, member: int) -> LogRecord:
    header = TrajectoryHeader(
        id=f"{run_id}-{index}-{member}",
        run_id=run_id,
        group_id=f"{run_id}/{index}",
        group_size=2,
        member=member,
        attempt=0,
        final=True,
        purpose="train",
        environment="shop@1",
        outcome=Outcome.completed(),
        reward=1.0,
        steps=1,
        sampled_tokens=1,
        oldest_version=0,
        ended_at=0.0,
    )
    return LogRecord(header=header, payload=b"x")


async def finish(log: SqliteLog, run_id: str, *indices: int) -> None:
    await log.append([record(run_id, index, member) for index in indices for member in (0, 1)])


async def test_a_run_is_created_once_per_request_id(registry):
    first = await registry.create("a", SETTINGS, "request")
    again = await registry.create("a", SETTINGS, "request")
    other = await registry.create("a", SETTINGS)
    assert first == again
    assert other.id != first.id
    assert [run.id for run in await registry.list()] == [other.id, first.id]
    assert await registry.get(first.id) == first


async def test_settings_survive_storage(registry):
    wanted = msgspec.structs.replace(SETTINGS, reward=RewardSettings(weights={"format": 0.5}), labels={"owner": "me"})
    run = await registry.create("a", wanted)
    assert (await registry.get(run.id)).settings == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 0}, "group_size is 0"),
        ({"groups_per_version": 0}, "groups_per_version is 0"),
        ({"max_attempts": 0}, "max_attempts is 0"),
        ({"groups": 0}, "groups is 0"),
        ({"staleness": -1}, "staleness is -1"),
        ({"seed": 2**63}, "seed is"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"purpose": "fun"}, "expected one of train, evaluate, collect"),
        ({"environment": ""}, "needs an environment"),
    ],
)
async def test_impossible_settings_are_refused_by_name(registry, change, message):
    with pytest.raises(ConfigError, match=message):
        await registry.create("a", msgspec.structs.replace(SETTINGS, **change))


async def test_an_unknown_run_is_named_in_the_error(registry):
    with pytest.raises(ConfigError, match="no run 'nope'"):
        await registry.get("nope")


async def test_tickets_have_the_next_tasks_and_seeds_that_follow_from_the_run(registry):
    run = await registry.create("a", SETTINGS)
    tickets, now, why = await registry.acquire(run.id, "w", 3, 1)
    assert [t.index for t in tickets] == [0, 1, 2]
    assert [t.group_id for t in tickets] == [f"{run.id}/{i}" for i in range(3)]
    assert [t.task.id for t in tickets] == ["train-0", "train-1", "train-2"]
    assert [t.seed for t in tickets] == [derived_seed(7, "shop", "train", i) for i in range(3)]
    assert all(t.group_size == 2 for t in tickets)
    assert now.groups_issued == 3
    assert why == ""


async def test_no_more_groups_start_than_the_staleness_bound_allows(registry, log):
    run = await registry.create("a", SETTINGS)
    tickets, _, _ = await registry.acquire(run.id, "w", 100, 1)
    assert len(tickets) == 8
    none, _, why = await registry.acquire(run.id, "w", 1, 0)
    assert none == []
    assert (
        why
        == "2 policy versions ahead of the trainer: 8 groups are waiting to be consumed (8 of them are still running)"
    )
    await finish(log, run.id, 0, 1, 2, 3)
    none, _, why = await registry.acquire(run.id, "w", 1, 0)
    assert none == []
    assert "(4 of them are still running)" in why
    await log.commit(run.id, "trainer", 3)
    tickets, _, _ = await registry.acquire(run.id, "w", 100, 1)
    assert [t.index for t in tickets] == [8, 9, 10]


async def test_a_waiting_worker_starts_when_the_trainer_commits(registry, log):
    run = await registry.create("a", SETTINGS)
    await registry.acquire(run.id, "w", 100, 1)
    await finish(log, run.id, 0)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(registry.acquire(run.id, "w", 100, 30))
        await log.commit(run.id, "trainer", 1)
    assert [t.index for t in waiting.result()[0]] == [8]


async def test_only_training_runs_are_bounded_by_a_trainer(registry):
    run = await registry.create("a", msgspec.structs.replace(SETTINGS, purpose="evaluate"))
    tickets, _, _ = await registry.acquire(run.id, "w", 50, 1)
    assert len(tickets) == 50


async def test_a_run_with_an_end_gives_out_just_so_many_groups_and_says_so(registry):
    run = await registry.create("r", msgspec.structs.replace(SETTINGS, purpose="collect", groups=3))
    tickets, _, _ = await registry.acquire(run.id, "w", 2, 0)
    more, _, _ = await registry.acquire(run.id, "w", 10, 0)
    assert [t.index for t in (*tickets, *more)] == [0, 1, 2]
    none, _, waiting_for = await registry.acquire(run.id, "w", 10, 0)
    assert none == []
    assert waiting_for == "nothing: all 3 groups of the run were handed out (3 of them are still running)"


async def test_a_paused_run_gives_no_tickets_and_says_who_paused_it(registry):
    run = await registry.create("a", SETTINGS)
    await registry.set_state(run.id, RunState.PAUSED, "kl breaker")
    tickets, now, why = await registry.acquire(run.id, "w", 1, 0)
    assert (tickets, now.state, why) == ([], RunState.PAUSED, "run is paused by kl breaker")
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(registry.acquire(run.id, "w", 1, 30))
        await registry.set_state(run.id, RunState.RUNNING, "a person")
    assert len(waiting.result()[0]) == 1


async def test_a_stopped_run_answers_at_once_and_stays_stopped(registry):
    run = await registry.create("a", SETTINGS)
    await registry.set_state(run.id, RunState.STOPPED, "a person")
    async with asyncio.timeout(10):
        tickets, now, why = await registry.acquire(run.id, "w", 1, 60)
    assert (tickets, now.state, why) == ([], RunState.STOPPED, "run is stopped by a person")
    with pytest.raises(ConfigError, match="stays so"):
        await registry.set_state(run.id, RunState.RUNNING, "a person")


async def test_a_lost_answer_is_given_again_instead_of_issuing_more(registry):
    run = await registry.create("a", SETTINGS)
    first, _, _ = await registry.acquire(run.id, "w", 3, 1, "request")
    again, now, _ = await registry.acquire(run.id, "w", 3, 1, "request")
    assert again == first
    assert now.groups_issued == 3
    await registry.set_state(run.id, RunState.PAUSED, "x")
    assert (await registry.acquire(run.id, "w", 3, 1, "request"))[0] == first


async def test_tickets_of_a_vanished_worker_go_to_the_next_asker_with_the_same_group_and_seed(registry, log, clock):
    run = await registry.create("a", SETTINGS)
    lost, _, _ = await registry.acquire(run.id, "gone", 2, 1)
    await finish(log, run.id, 0)
    clock.now += 599
    fresh, _, _ = await registry.acquire(run.id, "w", 1, 1)
    assert [t.index for t in fresh] == [2]
    clock.now += 2
    again, _, _ = await registry.acquire(run.id, "w", 1, 1)
    assert again == lost[1:]


async def test_asking_renews_a_workers_leases_but_not_for_ever(registry, clock):
    run = await registry.create("a", SETTINGS)
    held, _, _ = await registry.acquire(run.id, "slow", 8, 1)
    for _ in range(5):
        clock.now += 590
        assert (await registry.acquire(run.id, "slow", 1, 0))[0] == []
    assert (await registry.acquire(run.id, "other", 1, 0))[0] == []
    clock.now += 660
    assert (await registry.acquire(run.id, "slow", 1, 0))[0] == held[:1]


async def test_a_worker_that_reported_is_missed_sooner_than_one_that_never_did(registry, clock):
    run = await registry.create("a", SETTINGS)
    reporting, _, _ = await registry.acquire(run.id, "reporting", 1, 1)
    await registry.acquire(run.id, "silent", 1, 1)
    for _ in range(5):
        clock.now += 59
        await registry.report(run.id, [point()], "reporting")
    assert [t.index for t in (await registry.acquire(run.id, "w", 1, 0))[0]] == [2]
    clock.now += 61
    assert (await registry.acquire(run.id, "w", 1, 0))[0] == reporting


async def test_a_registry_that_was_away_waits_for_the_workers_to_be_heard_again(registry, clock, tmp_path):
    run = await registry.create("a", SETTINGS)
    held, _, _ = await registry.acquire(run.id, "w", 1, 1)
    await registry.report(run.id, [point()], "w")
    clock.now += 300
    later = RunRegistry(tmp_path / "farm.db", Shelf(), clock=clock)
    assert [t.index for t in (await later.acquire(run.id, "other", 1, 0))[0]] == [1]
    clock.now += 61
    assert (await later.acquire(run.id, "other", 1, 0))[0] == held
    await later.close()


async def test_tickets_whose_tasks_could_not_be_had_go_to_the_next_asker(tmp_path, clock):
    class Fussy(Shelf):
        broken = False

        async def tasks(self, environment: str, split: str, offset: int, limit: int) -> list[Task]:
            if self.broken and offset < 64:
                raise EnvironmentCodeError("tasks() raised")
            return await super().tasks(environment, split, offset, limit)

    shelf = Fussy()
    endless = msgspec.structs.replace(SETTINGS, purpose="collect")
    first = RunRegistry(tmp_path / "farm.db", shelf, clock=clock)
    run = await first.create("a", endless)
    await first.acquire(run.id, "gone", 64, 1)
    clock.now += 601
    shelf.broken = True
    second = RunRegistry(tmp_path / "farm.db", shelf, lease_seconds=1, clock=clock)
    clock.now += 2
    with pytest.raises(EnvironmentCodeError):
        await second.acquire(run.id, "w", 1, 0)
    shelf.broken = False
    tickets, _, _ = await second.acquire(run.id, "w", 1, 0)
    assert [t.index for t in tickets] == [0]
    await first.close()
    await second.close()


async def test_records_of_a_group_renew_its_lease(registry, log, clock):
    run = await registry.create("a", SETTINGS)
    await registry.acquire(run.id, "w", 2, 1)
    clock.now += 599
    await log.append([record(run.id, 0, 0)])
    clock.now += 2
    tickets, _, _ = await registry.acquire(run.id, "other", 1, 0)
    assert [t.index for t in tickets] == [1]
    tickets, _, _ = await registry.acquire(run.id, "other", 1, 0)
    assert [t.index for t in tickets] == [2]


async def test_a_finite_split_starts_again_from_its_beginning(tmp_path):
    shelf = Shelf(length=5)
    registry = RunRegistry(tmp_path / "farm.db", shelf)
    run = await registry.create("a", msgspec.structs.replace(SETTINGS, purpose="collect"))
    tickets, _, _ = await registry.acquire(run.id, "w", 12, 1)
    assert [t.task.id for t in tickets] == [f"train-{i % 5}" for i in range(12)]
    assert len({t.seed for t in tickets}) == 12
    assert len(shelf.asked) == 1
    await registry.close()


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(1, 700), start=st.integers(0, 5000))
async def test_tasks_are_found_by_index_modulo_length_wherever_one_begins(length, start):
    from envfarm.runs.cycle import TaskCycle

    pages = TaskCycle(Shelf(length))
    found = await pages.get("shop", "train", range(start, start + 70))
    assert [t.id for t in found] == [f"train-{i % length}" for i in range(start, start + 70)]


async def test_an_empty_split_is_an_error_that_names_it(tmp_path):
    registry = RunRegistry(tmp_path / "farm.db", Shelf(length=0))
    run = await registry.create("a", SETTINGS)
    with pytest.raises(ConfigError, match="no tasks in split 'train'"):
        await registry.acquire(run.id, "w", 1, 1)
    assert (await registry.get(run.id)).groups_issued == 0
    await registry.close()


async def test_a_task_source_that_breaks_issues_nothing(tmp_path):
    class Broken:
        async def tasks(self, *_: object) -> list[Task]:
            raise EnvironmentCodeError("tasks() raised")

    registry = RunRegistry(tmp_path / "farm.db", Broken())
    run = await registry.create("a", SETTINGS)
    with pytest.raises(EnvironmentCodeError):
        await registry.acquire(run.id, "w", 1, 1)
    assert (await registry.get(run.id)).groups_issued == 0
    await registry.close()


async def test_concurrent_workers_never_get_the_same_group(registry):
    run = await registry.create("a", msgspec.structs.replace(SETTINGS, purpose="collect"))
    answers = await asyncio.gather(*(registry.acquire(run.id, f"w{i}", 7, 5) for i in range(20)))
    indices = [t.index for tickets, _, _ in answers for t in tickets]
    assert sorted(indices) == list(range(140))


async def test_versions_only_grow(registry):
    run = await registry.create("a", SETTINGS)
    await registry.publish_version(run.id, 3)
    await registry.publish_version(run.id, 3)
    with pytest.raises(ConfigError, match="at policy version 3; 2 is older"):
        await registry.publish_version(run.id, 2)
    assert (await registry.get(run.id)).policy_version == 3


def point(name: str = "train/loss", step: int = 0, value: float = 1.0, source: str = "t") -> MetricPoint:
    return MetricPoint(name=name, step=step, value=value, at=float(step), source=source)


async def test_metrics_are_kept_by_series_and_a_step_is_replaced_by_a_later_report(registry):
    run = await registry.create("a", SETTINGS)
    await registry.report(run.id, [point(step=0), point(step=1), point("reward/format", 0, 0.5)])
    await registry.report(run.id, [point(step=1, value=9.0), point(step=2, value=math.nan)])
    loss = await registry.metrics(run.id, "train/loss")
    assert [(p.step, p.value) for p in loss[:2]] == [(0, 1.0), (1, 9.0)]
    assert math.isnan(loss[2].value)
    assert len(await registry.metrics(run.id)) == 4


async def test_a_long_series_is_thinned_and_keeps_its_ends(registry):
    run = await registry.create("a", SETTINGS)
    total = metrics.POINTS_PER_SERIES
    await registry.report(run.id, [point(step=i) for i in range(total)])
    await registry.report(run.id, [point(step=total)])
    steps = [p.step for p in await registry.metrics(run.id)]
    assert len(steps) < total
    assert steps[0] == 0
    assert steps[-1] == total


@pytest.mark.parametrize("bad", [point(""), point("x" * 300), point(step=-1)])
async def test_points_that_cannot_be_kept_are_refused(registry, bad):
    run = await registry.create("a", SETTINGS)
    with pytest.raises(ConfigError):
        await registry.report(run.id, [bad])


async def test_watching_tells_history_then_every_change(registry):
    run = await registry.create("a", SETTINGS)
    await registry.report(run.id, [point(step=0)])
    async with asyncio.timeout(10), aclosing(registry.watch(run.id, history=True)) as changes:
        now, points = await anext(changes)
        assert (now.id, [p.step for p in points]) == (run.id, [0])
        await registry.report(run.id, [point(step=1)])
        _, points = await anext(changes)
        assert [p.step for p in points] == [1]
        await registry.set_state(run.id, RunState.PAUSED, "me")
        now, points = await anext(changes)
        assert (now.state, points) == (RunState.PAUSED, [])


async def test_watching_without_history_begins_with_the_run_alone(registry):
    run = await registry.create("a", SETTINGS)
    await registry.report(run.id, [point(step=0)])
    async with asyncio.timeout(10), aclosing(registry.watch(run.id, history=False)) as changes:
        assert (await anext(changes))[1] == []


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    moves=st.lists(st.tuples(st.sampled_from(["acquire", "finish", "commit"]), st.integers(1, 9)), max_size=40),
    per_version=st.integers(1, 4),
    staleness=st.integers(0, 2),
)
async def test_the_window_holds_under_any_order_of_acquiring_finishing_and_committing(
    tmp_path_factory, moves, per_version, staleness
):
    path = tmp_path_factory.mktemp("window") / "farm.db"
    registry, log = RunRegistry(path, Shelf()), SqliteLog(path)
    run = await registry.create(
        "a", msgspec.structs.replace(SETTINGS, groups_per_version=per_version, staleness=staleness)
    )
    running: list[int] = []
    whole = consumed = issued = 0
    for move, amount in moves:
        if move == "acquire":
            tickets, now, _ = await registry.acquire(run.id, "w", amount, 0)
            running += [t.index for t in tickets]
            issued += len(tickets)
            assert now.groups_issued == issued
        elif move == "finish" and running:
            await finish(log, run.id, running.pop(amount % len(running)))
            whole += 1
        elif move == "commit":
            consumed = max(consumed, min(whole, consumed + amount))
            await log.commit(run.id, "trainer", consumed)
        assert issued - consumed <= per_version * (1 + staleness)
    await registry.close()
    await log.close()
