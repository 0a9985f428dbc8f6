"""Kill -9 of the server while senders append over gRPC and workers ask for tickets."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import aclosing

import pytest

from envfarm.core.log import LogRecord
from envfarm.core.outcome import Outcome
from envfarm.core.run import RunSettings
from envfarm.core.trajectory import TrajectoryHeader
from envfarm.trajectories.sqlite_log import SqliteLog
from envfarm.wire.channel import connect
from envfarm.wire.log_client import LogClient
from envfarm.wire.run_client import RunClient

pytestmark = pytest.mark.chaos

KILLS = int(os.environ.get("ENVFARM_CHAOS_KILLS", "4"))
SERVER = """
import asyncio, sys
from pathlib import Path
import grpc.aio
from envfarm.core.task import Task
from envfarm.gateway.intake import TrajectoryServicer
from envfarm.gateway.run_service import RunServicer
from envfarm.runs.registry import RunRegistry
from envfarm.trajectories.sqlite_log import SqliteLog
from envfarm.wire.channel import serve_options
from envfarm.wire.v1.run_pb2_grpc import add_RunServiceServicer_to_server
from envfarm.wire.v1.trajectory_pb2_grpc import add_TrajectoryServiceServicer_to_server

class Shelf:
    async def tasks(self, environment, split, offset, limit):
        return [Task(id=str(i)) for i in range(offset, offset + limit)]

async def main(folder):
    server = grpc.aio.server(options=serve_options())
    add_TrajectoryServiceServicer_to_server(TrajectoryServicer(SqliteLog(folder / "farm.db")), server)
    add_RunServiceServicer_to_server(RunServicer(RunRegistry(folder / "farm.db", Shelf())), server)
    server.add_insecure_port(f"unix:{folder}/socket")
    await server.start()
    print("serving", flush=True)
    await server.wait_for_termination()

asyncio.run(main(Path(sys.argv[1])))
"""


def start(folder) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", SERVER, str(folder)], stdout=subprocess.PIPE, text=True)


def record(run_id: str, group_id: str, member: int) -> LogRecord:
    header = TrajectoryHeader(
        id=f"{group_id}-{member}",
        run_id=run_id,
        group_id=group_id,
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
    return LogRecord(header=header, payload=os.urandom(3_000))


async def test_no_acknowledged_record_no_ticket_and_no_group_is_lost_or_doubled(tmp_path):
    """Two workers take tickets, run them and append; a trainer consumes; the server is killed again and again."""
    acknowledged: set[str] = set()
    issued: list[int] = []
    seen: list[int] = []
    groups: list[str] = []
    finished = asyncio.Event()
    milestones = [asyncio.Event() for _ in range(KILLS)]
    wanted = 60 * (KILLS + 1)

    async def worker(runs: RunClient, log: LogClient, run_id: str, name: str) -> None:
        while not finished.is_set():
            tickets, _, _ = await runs.acquire(run_id, name, 4, 1.0)
            issued.extend(t.index for t in tickets)
            for ticket in tickets:
                answers = await log.append([record(run_id, ticket.group_id, member) for member in (0, 1)])
                acknowledged.update(a.id for a in answers)

    async def trainer(log: LogClient, run_id: str) -> None:
        async with aclosing(log.subscribe(run_id, "trainer")) as stream:
            async for group in stream:
                seen.append(group.position)
                if len(seen) % 60 == 0 and len(seen) < wanted:
                    milestones[len(seen) // 60 - 1].set()
                groups.append(group.group_id)
                await log.commit(run_id, "trainer", group.position)
                if len(seen) >= wanted:
                    finished.set()
                    return

    async def killer(server: subprocess.Popen[str]) -> None:
        for kill in range(KILLS):
            await milestones[kill].wait()
            server.send_signal(signal.SIGKILL)
            await asyncio.to_thread(server.wait)
            server.stdout.close()
            server = start(tmp_path)
            assert await asyncio.to_thread(server.stdout.readline) == "serving\n"
        await finished.wait()
        server.kill()
        await asyncio.to_thread(server.wait)
        server.stdout.close()

    first = start(tmp_path)
    assert await asyncio.to_thread(first.stdout.readline) == "serving\n"
    async with asyncio.timeout(100), connect(f"unix:{tmp_path}/socket") as channel, LogClient(channel) as log:
        runs = RunClient(channel)
        run = await runs.create("chaos", RunSettings(environment="shop", group_size=2, groups_per_version=8))
        async with asyncio.TaskGroup() as tasks:
            ends = tasks.create_task(killer(first))
            trains = tasks.create_task(trainer(log, run.id))
            workers = [tasks.create_task(worker(runs, log, run.id, f"w{n}")) for n in range(2)]
            await trains
            for task in workers:
                task.cancel()
            await ends
    assert seen == list(range(1, wanted + 1))
    assert len(set(groups)) == wanted
    assert len(issued) == len(set(issued))
    store = SqliteLog(tmp_path / "farm.db")
    kept: set[str] = set()
    after = 0
    while page := await store.groups(run.id, purpose="train", after=after, limit=500, timeout=0):
        kept |= {r.header.id for g in page for r in g.records}
        after = page[-1].position
    assert acknowledged <= kept
    await store.close()
