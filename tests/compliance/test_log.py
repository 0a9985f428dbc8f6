"""What every ``TrajectoryLog`` does. Another store joins by adding itself to ``OPENERS``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envfarm.core.errors import LogError
from envfarm.core.log import LogCounts, LogRecord, TrajectoryLog
from envfarm.core.outcome import Outcome
from envfarm.core.trajectory import TrajectoryHeader
from envfarm.trajectories.sqlite_log import SqliteLog

OPENERS: dict[str, Callable[[Path], TrajectoryLog]] = {"sqlite": lambda folder: SqliteLog(folder / "farm.db")}
pytestmark = pytest.mark.compliance


@pytest.fixture(params=sorted(OPENERS))
def opener(request) -> Callable[[Path], TrajectoryLog]:
    return OPENERS[request.param]


@pytest.fixture
async def log(opener, tmp_path) -> AsyncIterator[TrajectoryLog]:
    log = opener(tmp_path)
    yield log
    await log.close()


def record(group: int, member: int = 0, *, size: int = 2, payload: bytes = b"x", **fields) -> LogRecord:
    header = TrajectoryHeader(
        id=f"{group}-{member}",
        run_id="run",
        group_id=f"run/{group}",
        group_size=size,
        member=member,
        attempt=0,
        final=True,
        purpose="train",
        environment="stockroom@1",
        outcome=Outcome.completed(),
        reward=0.5,
        steps=2,
        sampled_tokens=40,
        oldest_version=3,
        ended_at=1.5,
    )
    return LogRecord(header=msgspec.structs.replace(header, **fields), payload=payload)


async def whole(log: TrajectoryLog, after: int = 0, *, run: str = "run", purpose: str = "train", limit: int = 1000):
    return list(await log.groups(run, purpose=purpose, after=after, limit=limit, timeout=0))


async def test_records_come_back_as_they_were(log):
    sent = [record(0, 0, payload=bytes(range(256))), record(0, 1, payload=b"", reward=None, oldest_version=None)]
    await log.append(sent)
    (group,) = await whole(log)
    assert group.records == tuple(sent)
    assert (group.position, group.group_id) == (1, "run/0")


async def test_a_group_is_seen_only_when_every_member_has_a_final_record(log):
    await log.append([record(0, 0), record(0, 1, final=False, id="early")])
    assert await whole(log) == []
    await log.append([record(0, 1)])
    (group,) = await whole(log)
    assert [r.header.id for r in group.records] == ["0-0", "0-1"]


async def test_records_of_earlier_attempts_are_counted_and_left_out_of_the_group(log):
    await log.append([record(0, 0, final=False, id="a0", outcome=Outcome.infra_failed("host died"))])
    await log.append([record(0, 0, attempt=1), record(0, 1)])
    (group,) = await whole(log)
    assert [r.header.attempt for r in group.records] == [1, 0]
    counts = await log.counts("run")
    assert (counts.records, counts.trainable, counts.infra_failed) == (3, 2, 1)


async def test_a_failed_member_makes_its_group_whole_too(log):
    await log.append([record(0, 0, outcome=Outcome.infra_failed("host died"), reward=None), record(0, 1)])
    (group,) = await whole(log)
    assert [r.header.outcome.trainable for r in group.records] == [False, True]


async def test_positions_count_in_the_order_in_which_groups_became_whole(log):
    await log.append([record(0, 0), record(1, 0), record(2, 0)])
    for group in (1, 2, 0):
        await log.append([record(group, 1)])
    assert [(g.position, g.group_id) for g in await whole(log)] == [(1, "run/1"), (2, "run/2"), (3, "run/0")]
    assert [g.position for g in await whole(log, 1, limit=1)] == [2]
    assert await whole(log, 3) == []


async def test_runs_and_purposes_number_their_groups_apart(log):
    await log.append([record(0, m, size=1, id=f"a{m}") for m in (0,)])
    await log.append([record(0, size=1, id="b", purpose="evaluate")])
    await log.append([record(0, size=1, id="c", run_id="other", group_id="other/0")])
    assert [g.records[0].header.id for g in await whole(log)] == ["a0"]
    assert [g.position for g in await whole(log, purpose="evaluate")] == [1]
    assert [g.position for g in await whole(log, run="other")] == [1]


async def test_a_repeated_record_is_acknowledged_and_adds_nothing(log):
    first = await log.append([record(0, 0), record(0, 1)])
    again = await log.append([record(0, 1), record(1, 0), record(1, 0)])
    assert [a.duplicate for a in first] == [False, False]
    assert [(a.id, a.duplicate) for a in again] == [("0-1", True), ("1-0", False), ("1-0", True)]
    assert len(await whole(log)) == 1
    assert (await log.counts("run")).records == 3


async def test_a_second_record_for_a_member_does_not_change_a_group(log):
    await log.append([record(0, 0), record(0, 0, id="twin")])
    assert await whole(log) == []
    await log.append([record(0, 1), record(0, 1, id="late")])
    (group,) = await whole(log)
    assert [r.header.id for r in group.records] == ["0-0", "0-1"]


async def test_counts_add_up_and_are_zero_for_an_unknown_run(log):
    assert await log.counts("nobody") == LogCounts(records=0, trainable=0, infra_failed=0, groups=0, bytes=0)
    await log.append([record(0, 0, payload=b"12345"), record(0, 1, outcome=Outcome.aborted("me"))])
    assert await log.counts("run") == LogCounts(records=2, trainable=1, infra_failed=0, groups=1, bytes=6)


async def test_commits_never_move_back_and_belong_to_their_consumer(log):
    await log.append([record(g, size=1) for g in range(5)])
    assert await log.committed("run", "trainer") == 0
    await log.commit("run", "trainer", 4)
    await log.commit("run", "trainer", 2)
    assert await log.committed("run", "trainer") == 4
    assert await log.committed("run", "other") == 0


async def test_a_commit_beyond_the_last_whole_group_is_refused(log):
    await log.append([record(0, size=1)])
    with pytest.raises(LogError, match="has 1 whole groups"):
        await log.commit("run", "trainer", 2)


async def test_waiting_for_groups_ends_with_the_time_given(log):
    async with asyncio.timeout(10):
        assert list(await log.groups("run", purpose="train", after=0, limit=1, timeout=0.05)) == []


async def test_waiting_for_groups_ends_when_one_becomes_whole(log):
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(log.groups("run", purpose="train", after=0, limit=1, timeout=60))
        await log.append([record(0, 0)])
        await log.append([record(0, 1)])
    assert len(waiting.result()) == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"member": 2},
        {"member": -1},
        {"group_size": 0, "member": 0},
        {"id": ""},
        {"run_id": ""},
        {"group_id": ""},
        {"purpose": "fun"},
    ],
)
async def test_records_that_fit_no_group_are_refused_and_nothing_of_their_batch_is_stored(log, bad):
    wrong = msgspec.structs.replace(record(0, 1).header, **bad)
    with pytest.raises(LogError):
        await log.append([record(1, 0), LogRecord(header=wrong, payload=b"x")])
    assert (await log.counts("run")).records == 0


async def test_members_that_disagree_about_the_size_of_their_group_are_refused(log):
    await log.append([record(0, 0, size=2)])
    with pytest.raises(LogError, match="has 3 members"):
        await log.append([record(0, 1, size=3)])
    await log.append([record(0, 1, size=2)])
    assert len(await whole(log)) == 1


async def test_everything_is_there_after_opening_again(opener, tmp_path):
    first = opener(tmp_path)
    await first.append([record(0, 0), record(0, 1), record(1, 0)])
    await first.commit("run", "trainer", 1)
    await first.close()
    second = opener(tmp_path)
    assert await second.committed("run", "trainer") == 1
    assert (await second.append([record(0, 0)]))[0].duplicate
    await second.append([record(1, 1)])
    assert [g.position for g in await whole(second)] == [1, 2]
    await second.close()


async def test_concurrent_appends_are_each_acknowledged_in_their_own_order(log):
    answers = await asyncio.gather(*(log.append([record(g, m) for m in (0, 1)]) for g in range(100)))
    assert [[a.id for a in answer] for answer in answers] == [[f"{g}-0", f"{g}-1"] for g in range(100)]
    assert [g.position for g in await whole(log)] == list(range(1, 101))


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations([(g, m) for g in range(4) for m in range(3)]), st.integers(1, 5))
async def test_any_order_of_arrival_gives_the_same_groups(opener, tmp_path_factory, order, batch):
    log = opener(tmp_path_factory.mktemp("order"))
    seen: dict[int, set[int]] = {}
    finished = []
    for at in range(0, len(order), batch):
        await log.append([record(g, m, size=3) for g, m in order[at : at + batch]])
    for g, m in order:
        seen.setdefault(g, set()).add(m)
        if len(seen[g]) == 3:
            finished.append(f"run/{g}")
    groups = await whole(log)
    assert [g.group_id for g in groups] == finished
    assert [g.position for g in groups] == [1, 2, 3, 4]
    assert all([r.header.member for r in g.records] == [0, 1, 2] for g in groups)
    await log.close()
