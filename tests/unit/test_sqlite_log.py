"""The SQLite log's own promises: group commit, back-pressure, several processes, what people get to read."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys

import msgspec
import pytest

from envfarm.core.errors import ConfigError, CorruptRecord, LogError, Unavailable
from envfarm.core.log import LogRecord
from envfarm.core.messages import Message
from envfarm.core.outcome import Outcome
from envfarm.core.sandbox import Isolation
from envfarm.core.trajectory import Trajectory, TrajectoryHeader
from envfarm.storage.budget import ByteBudget
from envfarm.storage.database import Database
from envfarm.trajectories.codec import encode
from envfarm.trajectories.reader import read_trajectories
from envfarm.trajectories.sqlite_log import SqliteLog


def trajectory(number: int, run: str = "run") -> Trajectory:
    return Trajectory(
        id=f"{run}-{number}",
        run_id=run,
        group_id=f"{run}/{number}",
        group_size=1,
        member=0,
        attempt=0,
        final=True,
        purpose="train",
        environment="stockroom@1",
        split="train",
        task_id="0",
        seed=1,
        policy="p",
        outcome=Outcome.completed(),
        prompt=(Message(role="user", content="hi"),),
        segments=(),
        steps=(),
        reward=1.0,
        catalogue="",
        isolation=Isolation.NONE,
        started_at=0.0,
        ended_at=1.0,
    )


def record(number: int, run: str = "run", payload: bytes | None = None) -> LogRecord:
    t = trajectory(number, run)
    return LogRecord(header=TrajectoryHeader.of(t), payload=encode(t) if payload is None else payload)


async def test_all_that_waits_goes_into_one_transaction(tmp_path):
    database = Database.shared(tmp_path / "farm.db")
    log = SqliteLog(tmp_path / "farm.db")
    held = asyncio.ensure_future(database.write(lambda c: asyncio.run_coroutine_threadsafe(queued(), loop).result(10)))
    loop, appends = asyncio.get_running_loop(), []

    async def queued() -> None:
        """Runs while the writer is busy: these appends wait for it together."""
        appends.extend(asyncio.ensure_future(log.append([record(n)])) for n in range(50))
        await asyncio.sleep(0)

    await held
    before = database.version
    await asyncio.gather(*appends)
    assert database.version == before + 1
    await log.close()
    await database.close()


async def test_a_log_and_a_registry_in_one_process_share_one_writer(tmp_path):
    first, second = Database.shared(tmp_path / "farm.db"), Database.shared(tmp_path / "farm.db")
    assert first is second
    await first.close()
    assert await second.read(lambda c: c.execute("SELECT 1").fetchone()) == (1,)
    await second.close()
    third = Database.shared(tmp_path / "farm.db")
    assert third is not first
    await third.close()


async def test_an_unexpected_error_in_a_change_is_typed_and_undoes_it_alone(tmp_path):
    database = Database(tmp_path / "farm.db")

    def change(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO consumers VALUES ('r', 'c', 1)")
        raise TypeError("wrong")

    failed, stored = await asyncio.gather(
        database.write(change),
        database.write(lambda c: c.execute("INSERT INTO consumers VALUES ('r', 'd', 1)").rowcount),
        return_exceptions=True,
    )
    assert isinstance(failed, LogError)
    assert stored == 1
    assert await database.read(lambda c: c.execute("SELECT consumer FROM consumers").fetchall()) == [("d",)]
    await database.close()


async def test_writing_to_a_closed_log_is_a_typed_error(tmp_path):
    log = SqliteLog(tmp_path / "farm.db")
    await log.close()
    with pytest.raises(LogError, match="closed"):
        await log.append([record(0)])


async def test_closing_stores_what_waits(tmp_path):
    log = SqliteLog(tmp_path / "farm.db")
    appends = [asyncio.ensure_future(log.append([record(n)])) for n in range(20)]
    await asyncio.sleep(0)
    await log.close()
    assert all(len(answer) == 1 for answer in await asyncio.gather(*appends))
    assert len(list(read_trajectories(tmp_path / "farm.db"))) == 20


async def test_groups_completed_by_another_process_are_seen(tmp_path):
    path = tmp_path / "farm.db"
    log = SqliteLog(path)
    waiting = asyncio.ensure_future(log.groups("run", purpose="train", after=0, limit=5, timeout=60))
    payload = msgspec.msgpack.encode(record(0))
    code = (
        "import asyncio, sys, msgspec\n"
        "from envfarm.core.log import LogRecord\n"
        "from envfarm.trajectories.sqlite_log import SqliteLog\n"
        "async def main():\n"
        f"    log = SqliteLog({str(path)!r})\n"
        "    await log.append([msgspec.msgpack.decode(sys.stdin.buffer.read(), type=LogRecord)])\n"
        "    await log.close()\n"
        "asyncio.run(main())\n"
    )
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], input=payload, check=True, timeout=60)
    async with asyncio.timeout(30):
        (group,) = await waiting
    assert group.records == (record(0),)
    assert [a.duplicate for a in await log.append([record(0), record(1)])] == [True, False]
    await log.close()


async def test_two_writers_on_one_file_both_get_through(tmp_path):
    one, other = Database(tmp_path / "farm.db"), Database(tmp_path / "farm.db")

    async def count(database: Database, name: str) -> None:
        for _ in range(50):
            await database.write(
                lambda c: (
                    c.execute(
                        "INSERT INTO consumers VALUES (?, 'c', 1) ON CONFLICT DO UPDATE SET position = position + 1",
                        (name,),
                    )
                    and None
                )
            )

    async with asyncio.timeout(60):
        await asyncio.gather(count(one, "a"), count(other, "b"))
    rows = await one.read(lambda c: c.execute("SELECT position FROM consumers").fetchall())
    assert rows == [(50,), (50,)]
    await one.close()
    await other.close()


async def test_large_groups_are_read_in_pages_of_bounded_size(tmp_path):
    log = SqliteLog(tmp_path / "farm.db")
    await log.append([record(n, payload=bytes(5_000_000)) for n in range(8)])
    page = await log.groups("run", purpose="train", after=0, limit=100, timeout=0)
    assert [g.position for g in page] == [1, 2, 3, 4]
    await log.close()


async def test_a_file_of_a_newer_release_is_refused(tmp_path):
    path = tmp_path / "farm.db"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ConfigError, match="use a newer release"):
        SqliteLog(path)


async def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(LogError, match="its folder must exist"):
        SqliteLog(tmp_path / "nowhere" / "farm.db")


async def test_a_file_that_is_no_database_is_named(tmp_path):
    (tmp_path / "farm.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(CorruptRecord, match="is damaged"):
        SqliteLog(tmp_path / "farm.db")


async def test_a_group_that_would_not_fit_a_message_is_refused_while_it_grows(tmp_path):
    log = SqliteLog(tmp_path / "farm.db")
    header = msgspec.structs.replace(record(0).header, group_size=3)
    members = [msgspec.structs.replace(header, id=f"m{m}", member=m) for m in range(3)]
    payload = bytes(25_000_000)
    await log.append([LogRecord(header=h, payload=payload) for h in members[:2]])
    with pytest.raises(LogError, match="group run/0 would take"):
        await log.append([LogRecord(header=members[2], payload=payload)])
    await log.close()


async def test_people_read_trajectories_of_a_run_while_the_log_is_open(tmp_path):
    log = SqliteLog(tmp_path / "farm.db")
    await log.append([record(n) for n in range(3)] + [record(n, "other") for n in range(2)])
    assert [t.id for t in read_trajectories(tmp_path / "farm.db", "run", 2)] == ["run-0", "run-1"]
    assert list(read_trajectories(tmp_path / "farm.db", "other")) == [trajectory(0, "other"), trajectory(1, "other")]
    assert len(list(read_trajectories(tmp_path / "farm.db"))) == 5
    await log.close()
    assert len(list(read_trajectories(tmp_path / "farm.db"))) == 5


def test_reading_a_file_that_is_not_there_says_where_to_look(tmp_path):
    with pytest.raises(ConfigError, match="--state folder"):
        next(read_trajectories(tmp_path / "farm.db"))


async def test_room_is_given_in_the_order_in_which_it_was_asked_for():
    budget = ByteBudget(100)
    await budget.take(80, timeout=1)
    order: list[int] = []

    async def take(size: int) -> None:
        await budget.take(size, timeout=10)
        order.append(size)

    async with asyncio.TaskGroup() as tasks:
        first, second, third = (tasks.create_task(take(size)) for size in (90, 10, 5))
        await asyncio.sleep(0)
        assert order == []
        budget.give(80)
        await first
        await second
        assert order == [90, 10]
        budget.give(90)
        await third
    assert budget.taken == 15


async def test_no_room_in_time_is_an_error_and_takes_nothing():
    budget = ByteBudget(100)
    await budget.take(100, timeout=1)
    with pytest.raises(Unavailable, match="no room"):
        await budget.take(1, timeout=0.01)
    waiting = asyncio.ensure_future(budget.take(1, timeout=10))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    budget.give(100)
    assert budget.taken == 0
    await budget.take(1_000, timeout=1)
    assert budget.taken == 1_000
