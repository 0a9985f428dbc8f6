"""Groups under one bound: every member ends with a final record, what the farm failed is tried again."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfarm.core.episode import Opened, StepAnswer
from envfarm.core.errors import ConfigError, FarmError, LogFull, SlotLost, Unavailable
from envfarm.core.log import Appended, LogRecord
from envfarm.core.messages import AssistantMessage, Diagnosis, Message
from envfarm.core.outcome import Outcome, OutcomeKind
from envfarm.core.rewards import RewardSettings
from envfarm.core.sandbox import Isolation
from envfarm.core.task import Limits, Task
from envfarm.core.trajectory import StepRecord, Trajectory
from envfarm.rollout.evaluation import evaluate, summarise
from envfarm.rollout.groups import GroupSpec, run_group
from envfarm.rollout.log_writer import LogWriter
from envfarm.rollout.metrics import Meter
from envfarm.rollout.ports import PolicySide
from envfarm.rollout.scheduling import InFlight
from envfarm.rollout.scripted import ScriptedEngine
from envfarm.rollout.tokens import PolicyTokenizer
from envfarm.rollout.tokens.template import TemplateBuilder
from envfarm.trajectories.codec import decode
from trainer_bridge.warmup_tokenizer import train_tokenizer


@functools.cache
def tokens() -> TemplateBuilder:
    return TemplateBuilder(PolicyTokenizer(train_tokenizer(["say yes or no"] * 3, 300)))


class OneStep:
    """A gateway whose episodes end after one step; ``fails`` says which opens break."""

    def __init__(self, fails: Callable[[int], FarmError | None] = lambda _: None, *, tasks: int = 3) -> None:
        self.fails = fails
        self.opened = 0
        self.running = 0
        self.most = 0
        self.seeds: list[int] = []
        self.hold: asyncio.Event | None = None
        self.stepping = asyncio.Semaphore(0)
        self._tasks = [Task(id=f"task-{i}", prompt="yes or no?") for i in range(tasks)]

    async def tasks(self, environment: str, split: str, offset: int, limit: int) -> list[Task]:
        return self._tasks[offset : offset + limit]

    async def open(
        self,
        *,
        environment: str,
        task: Task,
        seed: int,
        run_id: str = "",
        reward: RewardSettings | None = None,
        request_id: str,
        timeout: float,
    ) -> Opened:
        self.opened += 1
        self.seeds.append(seed)
        if (error := self.fails(self.opened - 1)) is not None:
            raise error
        self.running += 1
        self.most = max(self.most, self.running)
        return Opened(
            handle=task.id,
            episode_id=request_id,
            messages=(Message(role="user", content=str(task.prompt)),),
            tools=(),
            catalogue="",
            limits=Limits(seconds=30),
            isolation=Isolation.NONE,
            environment="coin@1",
        )

    async def step(
        self,
        handle: str,
        index: int,
        action: AssistantMessage,
        *,
        sampled_tokens: int | None = None,
        truncated: bool = False,
        limit: str = "",
        timeout: float,
    ) -> StepAnswer:
        self.stepping.release()
        if self.hold is not None:
            await self.hold.wait()
        value = 1.0 if action.content == "yes" else 0.0
        return StepAnswer(
            index=index,
            messages=(),
            results=(),
            parts={"completion": value, "format": None},
            reward=value,
            done=True,
            outcome=Outcome.completed(),
            diagnosis=Diagnosis.NONE,
            seconds=0.0,
        )

    async def close(self, handle: str, reason: str = "") -> None:
        self.running -= 1


class MemoryLog:
    def __init__(self, *errors: FarmError) -> None:
        self.errors = list(errors)
        self.records: list[LogRecord] = []

    async def append(self, records: Sequence[LogRecord], *, timeout: float) -> list[Appended]:
        if self.errors:
            raise self.errors.pop(0)
        self.records += records
        return [Appended(id=record.header.id, duplicate=False) for record in records]


def policy_side(gateway: OneStep, log: MemoryLog | None = None, answer: str = "yes") -> PolicySide:
    engine = ScriptedEngine(tokens()._tokenizer, [answer], version=2)
    return PolicySide(episodes=gateway, engine=engine, tokens=tokens(), log=log or MemoryLog(), name="tiny")


def group(**changes: object) -> GroupSpec:
    fields = {
        "group_id": "group",
        "run_id": "run",
        "size": 4,
        "task": Task(id="t", prompt="yes or no?"),
        "seed": 11,
        "environment": "coin",
        "split": "train",
    }
    return GroupSpec(**(fields | changes))  # type: ignore[arg-type]


async def run(
    spec: GroupSpec, gateway: OneStep, concurrency: int = 8, in_flight: InFlight | None = None
) -> list[Trajectory]:
    seen: list[Trajectory] = []

    async def finished(trajectory: Trajectory) -> None:
        seen.append(trajectory)

    await run_group(spec, policy_side(gateway), in_flight or InFlight(concurrency), finished)
    return seen


async def test_members_share_the_seed_of_their_group_and_all_end() -> None:
    gateway = OneStep()
    seen = await run(group(), gateway)
    assert gateway.seeds == [11] * 4
    assert sorted(t.member for t in seen) == [0, 1, 2, 3]
    assert all(t.final and t.outcome == Outcome.completed() for t in seen)


async def test_no_more_episodes_run_at_once_than_the_bound_allows() -> None:
    gateway = OneStep()
    await run(group(size=9), gateway, concurrency=2)
    assert gateway.most == 2
    assert gateway.running == 0


@settings(deadline=None, max_examples=25)
@given(broken=st.sets(st.integers(0, 11)), attempts=st.integers(1, 3))
async def test_every_member_has_one_final_record_after_consecutive_attempts(broken: set[int], attempts: int) -> None:
    gateway = OneStep(lambda number: SlotLost("gone") if number in broken else None)
    seen = await run(group(max_attempts=attempts), gateway, concurrency=1)
    for member in range(4):
        mine = sorted((t for t in seen if t.member == member), key=lambda t: t.attempt)
        assert [t.attempt for t in mine] == list(range(len(mine)))
        assert [t.final for t in mine] == [False] * (len(mine) - 1) + [True]
        assert all(t.outcome.kind is OutcomeKind.INFRA_FAILED for t in mine[:-1])
        assert mine[-1].outcome.trainable or len(mine) == attempts
    assert len({t.id for t in seen}) == len(seen)


async def test_aborting_everything_records_running_waiting_and_later_episodes_as_aborted() -> None:
    gateway, in_flight = OneStep(), InFlight(2)
    gateway.hold = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run(group(size=3), gateway, in_flight=in_flight))
        for _ in range(2):
            await gateway.stepping.acquire()
        assert in_flight.open == 2
        assert in_flight.waiting_for() == {"the environment": 2, "a place in this worker": 1}
        assert in_flight.longest() is not None
        in_flight.abort_all("shutdown")
    later = await run(group(size=1, group_id="later"), gateway, in_flight=in_flight)
    for trajectory in [*running.result(), *later]:
        assert trajectory.outcome == Outcome.aborted("shutdown")
        assert trajectory.final
    assert gateway.running == 0
    assert in_flight.waiting_for() == {}


async def test_the_log_gets_every_attempt_with_a_payload_that_reads_back() -> None:
    log = MemoryLog(Unavailable("restarting"), LogFull("disk full"))
    gateway = OneStep(lambda number: SlotLost("gone") if number == 0 else None)
    evaluation = await evaluate(policy_side(gateway, log), environment="coin", split="test", count=5, seed=3)
    assert len(log.records) == 6
    assert Counter(r.header.final for r in log.records) == {True: 5, False: 1}
    for record in log.records:
        trajectory = decode(record.payload)
        assert (trajectory.id, trajectory.outcome) == (record.header.id, record.header.outcome)
        assert trajectory.purpose == "evaluate"
    assert evaluation.success == 1.0
    assert (evaluation.judged, evaluation.outcomes) == (5, {"completed": 5})
    assert evaluation.versions == (2, 2)
    assert evaluation.parts == {"completion": 1.0}


async def test_a_log_that_stays_away_ends_the_writer_with_its_error_and_nobody_hangs() -> None:
    log = MemoryLog(*[Unavailable("no gateway")] * 50)
    trajectories = await run(group(size=1), OneStep())

    async def flood() -> None:
        async with LogWriter(log, patience_s=0.0) as writer:
            while True:
                await writer.put(trajectories[0])
                await asyncio.sleep(0)

    with pytest.raises(ExceptionGroup) as caught:
        await flood()
    assert caught.group_contains(Unavailable)


async def test_an_evaluation_starts_over_where_a_split_is_shorter_and_seeds_stay_distinct() -> None:
    gateway, seen = OneStep(tasks=2), []
    evaluation = await evaluate(
        policy_side(gateway, answer="no"),
        environment="coin",
        split="validation",
        count=5,
        concurrency=2,
        on_trajectory=lambda t: seen.append(t.task_id),
    )
    assert Counter(seen) == {"task-0": 3, "task-1": 2}
    assert len(set(gateway.seeds)) == 5
    assert evaluation.success == 0.0
    assert gateway.most == 2


async def test_the_same_seed_gives_the_same_tokens_and_another_seed_other_episodes() -> None:
    async def seeds(seed: int) -> list[int]:
        gateway = OneStep()
        await evaluate(policy_side(gateway), environment="coin", split="test", count=3, seed=seed)
        return sorted(gateway.seeds)

    assert await seeds(1) == await seeds(1)
    assert not set(await seeds(1)) & set(await seeds(2))


@pytest.mark.parametrize(("count", "tasks", "words"), [(0, 3, "at least 1"), (4, 0, "no tasks in split 'nowhere'")])
async def test_an_evaluation_of_nothing_says_what_is_wrong(count: int, tasks: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        await evaluate(policy_side(OneStep(tasks=tasks)), environment="coin", split="nowhere", count=count)


async def test_means_leave_out_what_the_farm_failed_and_what_was_not_measured() -> None:
    good = await run(group(size=1), OneStep())
    failed = await run(group(size=1, max_attempts=1), OneStep(lambda _: SlotLost("gone")))
    evaluation = summarise([*good, *failed], seconds=1.0)
    assert (evaluation.success, evaluation.judged, evaluation.reward) == (1.0, 1, 1.0)
    assert evaluation.outcomes == {"completed": 1, "infra_failed(slot_lost: gone)": 1}
    nothing = summarise(failed, seconds=1.0)
    assert (nothing.success, nothing.reward, nothing.parts, nothing.versions) == (None, None, {}, None)


async def test_a_meter_tells_what_happened_since_it_was_last_read_and_nothing_else() -> None:
    (good,) = await run(group(size=1), OneStep())
    failed = await run(group(size=1, max_attempts=2), OneStep(lambda _: SlotLost("gone")))
    meter = Meter(now=10.0)
    for trajectory in [good, *failed]:
        meter.trajectory(trajectory)
    malformed = StepRecord(
        index=0,
        message=Message(role="assistant"),
        replies=(),
        diagnosis=Diagnosis.SYNTAX,
        parts={},
        reward=None,
        sampled_tokens=4,
    )
    meter.step(malformed)
    meter.step(good.steps[0])
    sampled = 4 + good.steps[0].sampled_tokens
    assert meter.take(now=12.0) == {
        "rollout/episodes": 2.0,
        "rollout/infra_failed": 2.0,
        "rollout/steps_per_s": 1.0,
        "rollout/tokens_per_s": sampled / 2,
        "rollout/success": 1.0,
        "rollout/reward": 1.0,
        "rollout/steps_per_episode": 1.0,
        "rollout/format_errors": 0.5,
        "reward/completion": 1.0,
    }
    assert meter.take(now=13.0) == {
        "rollout/episodes": 2.0,
        "rollout/infra_failed": 2.0,
        "rollout/steps_per_s": 0.0,
        "rollout/tokens_per_s": 0.0,
    }
