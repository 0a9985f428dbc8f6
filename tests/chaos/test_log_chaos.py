"""The log under kill -9, cut files, a full disk and a read-only one: nothing that was acknowledged is lost."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc.aio
import pytest

from envfarm.core.errors import LogError, LogFull
from envfarm.core.log import LogRecord
from envfarm.core.outcome import Outcome
from envfarm.core.trajectory import TrajectoryHeader
from envfarm.gateway.intake import TrajectoryServicer
from envfarm.trajectories.sqlite_log import SqliteLog
from envfarm.wire.channel import connect, serve_options
from envfarm.wire.log_client import LogClient
from envfarm.wire.v1.trajectory_pb2_grpc import add_TrajectoryServiceServicer_to_server

pytestmark = pytest.mark.chaos

KILLS = int(os.environ.get("ENVFARM_CHAOS_KILLS", "4"))

WRITER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from test_log_chaos import record
from envfarm.trajectories.sqlite_log import SqliteLog

async def main():
    log = SqliteLog(Path({path!r}))
    async def write(first):
        for number in range(first, first + 100_000):
            for answer in await log.append([record(number, member) for member in (0, 1)]):
                sys.stdout.write(answer.id + "\\n")
            sys.stdout.flush()
    await asyncio.gather(*(write({start} + 100_000 * n) for n in range(4)))

asyncio.run(main())
"""


def record(group: int, member: int = 0, *, size: int = 2, payload: bytes | None = None) -> LogRecord:
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
    return LogRecord(header=header, payload=content(group, member) if payload is None else payload)


def content(group: int, member: int) -> bytes:
    """Two to nine kilobytes that follow from the place of the record, so that any mix-up shows."""
    rng = random.Random(f"{group}/{member}")
    return rng.randbytes(rng.randrange(2_000, 9_000))


async def stored(path: Path) -> dict[str, bytes]:
    """Payload by id of all whole groups, after checking that the file is sound and positions have no gap."""
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    log = SqliteLog(path)
    found: dict[str, bytes] = {}
    after = 0
    while groups := await log.groups("run", purpose="train", after=after, limit=500, timeout=0):
        assert [g.position for g in groups] == list(range(after + 1, after + 1 + len(groups)))
        after = groups[-1].position
        found |= {r.header.id: r.payload for g in groups for r in g.records}
    counts = await log.counts("run")
    assert counts.groups == after
    await log.close()
    return found


def start(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


async def test_kill_9_of_the_writer_loses_nothing_that_was_acknowledged(tmp_path):
    path = tmp_path / "farm.db"
    acknowledged: set[str] = set()
    for kill in range(KILLS):
        code = WRITER.format(folder=str(Path(__file__).parent), path=str(path), start=kill * 1_000_000)
        with start(code) as writer:
            wanted = len(acknowledged) + 100 + 137 * kill
            while len(acknowledged) < wanted:
                line = await asyncio.to_thread(writer.stdout.readline)
                assert line, "the writer ended by itself"
                acknowledged.add(line.strip())
            writer.send_signal(signal.SIGKILL)
            rest = await asyncio.to_thread(writer.stdout.read)
            acknowledged |= {line for line in rest.split("\n")[:-1] if line}
        found = await stored(path)
        assert acknowledged <= set(found)
        assert all(payload == content(*map(int, name.split("-"))) for name, payload in found.items())


async def test_cutting_the_end_of_the_file_at_any_offset_leaves_every_whole_record_before_it(tmp_path):
    path, wal = tmp_path / "farm.db", tmp_path / "farm.db-wal"
    log = SqliteLog(path)
    ends: list[int] = []
    for group in range(12):
        await log.append([record(group, size=1)])
        ends.append(wal.stat().st_size)
    copy = tmp_path / "copy"
    copy.mkdir()
    rng = random.Random(3)
    offsets = sorted({0, 1, *ends, *(end - 1 for end in ends), *(rng.randrange(ends[-1]) for _ in range(40))})
    for cut in offsets:
        for name in ("farm.db-shm", "farm.db-wal"):
            (copy / name).unlink(missing_ok=True)
        shutil.copy(path, copy / "farm.db")
        (copy / "farm.db-wal").write_bytes(wal.read_bytes()[:cut])
        found = await stored(copy / "farm.db")
        whole = sum(end <= cut for end in ends)
        assert sorted(found) == sorted(f"{g}-0" for g in range(whole))
        again = SqliteLog(copy / "farm.db")
        await again.append([record(100, size=1)])
        assert (await again.counts("run")).records == whole + 1
        await again.close()
    await log.close()


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """A real file system of its own; skips where none can be mounted."""
    disk = folder / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("mounting a small disk needs root")
    made = subprocess.run(
        [mount, "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {made.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


async def fill(log: SqliteLog, first: int = 0) -> int:
    """Append until the disk is full; returns how many groups were acknowledged."""
    for number in range(first, first + 10_000):
        try:
            await log.append([record(number, size=1)])
        except LogFull:
            return number - first
    raise AssertionError("the disk never filled up")


async def test_a_full_disk_is_an_error_that_loses_nothing_and_ends_when_there_is_room(tmp_path):
    with small_disk(tmp_path, 6) as disk:
        filler = disk / "filler"
        filler.write_bytes(bytes(3 << 20))
        log = SqliteLog(disk / "farm.db")
        first = await fill(log)
        assert first > 10
        with pytest.raises(LogFull, match="free space"):
            await log.append([record(first, size=1, payload=bytes(200_000))])
        assert (await log.counts("run")).records == first
        filler.unlink()
        second = await fill(log, first)
        assert second > 10
        assert (await log.counts("run")).records == first + second
        await log.close()
        for file in disk.glob("farm.db*"):  # a full disk leaves no room to empty the write-ahead log into the file
            shutil.copy(file, tmp_path)
    found = await stored(tmp_path / "farm.db")
    assert set(found) == {f"{n}-0" for n in range(first + second)}


async def test_senders_wait_through_a_full_disk_and_go_on_when_it_has_room(tmp_path):
    with small_disk(tmp_path, 6) as disk:
        filler = disk / "filler"
        filler.write_bytes(bytes(2 << 20))
        log = SqliteLog(disk / "farm.db")
        server = grpc.aio.server(options=serve_options())
        add_TrajectoryServiceServicer_to_server(TrajectoryServicer(log), server)
        server.add_insecure_port(f"unix:{tmp_path}/socket")
        await server.start()
        first = await fill(log)
        async with connect(f"unix:{tmp_path}/socket") as channel, LogClient(channel) as client:
            big = record(first, size=1, payload=bytes(300_000))
            with pytest.raises(LogFull):
                await client.append([big], timeout=0.5)
            async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
                waiting = tasks.create_task(client.append([big], timeout=25))
                await asyncio.wait((waiting,), timeout=0.3)
                assert not waiting.done()
                filler.unlink()
            assert [a.id for a in waiting.result()] == [f"{first}-0"]
        await server.stop(0)
        await log.close()


async def test_a_disk_that_turns_read_only_is_named_and_nothing_is_acknowledged(tmp_path):
    with small_disk(tmp_path, 8) as disk:
        log = SqliteLog(disk / "farm.db")
        await log.append([record(0, size=1)])
        await log.close()
        remount(disk, "ro")
        with pytest.raises(LogError, match="read-only"):
            SqliteLog(disk / "farm.db")
        remount(disk, "rw")
        again = SqliteLog(disk / "farm.db")
        assert (await again.counts("run")).records == 1
        await again.close()


LIMITED = """
import asyncio, resource, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from test_log_chaos import record
from envfarm.core.errors import LogError
from envfarm.trajectories.sqlite_log import SqliteLog

async def main():
    log = SqliteLog(Path({path!r}))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    for number in range(10_000):
        try:
            await log.append([record(number, size=1)])
        except LogError as error:
            name = type(error).__name__
            break
        print(number, flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await log.append([record(number, size=1)])
    print(number, name, flush=True)
    await log.close()

asyncio.run(main())
"""


async def test_a_file_size_limit_is_an_error_that_ends_with_the_limit(tmp_path):
    code = LIMITED.format(folder=str(Path(__file__).parent), path=str(tmp_path / "farm.db"))
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    lines = done.stdout.split("\n")[:-1]
    assert lines[-1].split()[1] in ("LogFull", "LogError")
    assert set(await stored(tmp_path / "farm.db")) == {f"{line.split()[0]}-0" for line in lines}
