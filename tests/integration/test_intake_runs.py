"""The run registry over gRPC, beside the log that its window looks at."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from envfarm.core.errors import ConfigError
from envfarm.core.log import LogRecord
from envfarm.core.outcome import Outcome
from envfarm.core.rewards import RewardSettings
from envfarm.core.run import MetricPoint, RunSettings, RunState
from envfarm.core.task import Task
from envfarm.core.trajectory import TrajectoryHeader
from envfarm.gateway.intake import TrajectoryServicer
from envfarm.gateway.run_service import RunServicer
from envfarm.runs.registry import RunRegistry
from envfarm.trajectories.sqlite_log import SqliteLog
from envfarm.wire.channel import connect, serve_options
from envfarm.wire.log_client import LogClient
from envfarm.wire.run_client import RunClient
from envfarm.wire.v1.run_pb2_grpc import add_RunServiceServicer_to_server
from envfarm.wire.v1.trajectory_pb2_grpc import add_TrajectoryServiceServicer_to_server

SETTINGS = RunSettings(
    environment="shop",
    seed=7,
    group_size=1,
    groups_per_version=2,
    staleness=1,
    temperature=0.0,
    reward=RewardSettings(weights={"format": 0.5}, caps={"format": 1.0}, gamma=0.9),
    labels={"owner": "me"},
)


class Shelf:
    async def tasks(self, environment: str, split: str, offset: int, limit: int) -> Sequence[Task]:
        return [Task(id=f"{split}-{i}", prompt=f"task {i}", data={"i": i}) for i in range(offset, offset + limit)]


@asynccontextmanager
async def served(folder: Path):
    """A server with log and registry on a socket in ``folder``."""
    log, registry = SqliteLog(folder / "farm.db"), RunRegistry(folder / "farm.db", Shelf())
    server = grpc.aio.server(options=serve_options())
    add_TrajectoryServiceServicer_to_server(TrajectoryServicer(log), server)
    add_RunServiceServicer_to_server(RunServicer(registry), server)
    server.add_insecure_port(f"unix:{folder}/socket")
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)
        await registry.close()
        await log.close()


@asynccontextmanager
async def clients(folder: Path):
    async with connect(f"unix:{folder}/socket") as channel, LogClient(channel) as log:
        yield RunClient(channel), log


def record(run_id: str, index: int) -> LogRecord:
    header = TrajectoryHeader(
        id=f"t-{index}",
        run_id=run_id,
        group_id=f"{run_id}/{index}",
        group_size=1,
        member=0,
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


async def test_a_run_keeps_its_settings_and_state_across_the_wire(tmp_path):
    async with served(tmp_path), clients(tmp_path) as (runs, _):
        run = await runs.create("first", SETTINGS, "request")
        assert run.settings == SETTINGS
        assert await runs.create("first", SETTINGS, "request") == run
        paused = await runs.set_state(run.id, RunState.PAUSED, "a person")
        assert (paused.state, paused.cause) == (RunState.PAUSED, "a person")
        assert await runs.list() == [await runs.get(run.id)] == [paused]


async def test_errors_keep_their_class_and_text(tmp_path):
    async with served(tmp_path), clients(tmp_path) as (runs, _):
        with pytest.raises(ConfigError, match="no run 'nope'"):
            await runs.get("nope")
        with pytest.raises(ConfigError, match="no run 'nope'"):
            await runs.acquire("nope", "w", 1, 1)
        with pytest.raises(ConfigError, match="no run 'nope'"):
            await anext(runs.watch("nope"))
        with pytest.raises(ConfigError, match="expected one of"):
            await runs.create("x", RunSettings(environment="shop", purpose="fun"))


async def test_workers_get_tickets_as_the_trainer_consumes(tmp_path):
    async with served(tmp_path), clients(tmp_path) as (runs, log):
        run = await runs.create("first", SETTINGS)
        tickets, _, _ = await runs.acquire(run.id, "w", 10, 5)
        assert [(t.index, t.task.id, t.group_size) for t in tickets] == [(i, f"train-{i}", 1) for i in range(4)]
        assert tickets[0].task == Task(id="train-0", prompt="task 0", data={"i": 0})
        none, _, why = await runs.acquire(run.id, "w", 1, 0.05)
        assert (none, why.split(":")[0]) == ([], "2 policy versions ahead of the trainer")
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(runs.acquire(run.id, "w", 1, 15))
            await log.append([record(run.id, i) for i in range(2)])
            await log.commit(run.id, "trainer", 2)
        assert [t.index for t in waiting.result()[0]] == [4]


async def test_a_worker_that_waits_goes_on_waiting_when_the_server_is_replaced(tmp_path):
    async with clients(tmp_path) as (runs, _), asyncio.timeout(30):
        async with served(tmp_path):
            run = await runs.create("first", SETTINGS)
            await runs.set_state(run.id, RunState.PAUSED, "me")
            waiting = asyncio.ensure_future(runs.acquire(run.id, "w", 1, 20))
            await asyncio.wait((waiting,), timeout=0.3)
        async with served(tmp_path):
            await runs.set_state(run.id, RunState.RUNNING, "me")
            tickets, _, _ = await waiting
        assert [t.index for t in tickets] == [0]


async def test_metrics_and_versions_reach_watchers(tmp_path):
    async with served(tmp_path), clients(tmp_path) as (runs, _):
        run = await runs.create("first", SETTINGS)
        point = MetricPoint(name="train/loss", step=0, value=1.5, at=2.0, source="trainer")
        await runs.report(run.id, [point])
        async with asyncio.timeout(20), aclosing(runs.watch(run.id, history=True)) as changes:
            assert await anext(changes) == (run, [point])
            await runs.publish_version(run.id, 1)
            now, points = await anext(changes)
            assert (now.policy_version, points) == (1, [])
            await runs.report(run.id, [MetricPoint(name="x", step=1, value=math.nan, at=2.0, source="s")])
            _, (odd,) = await anext(changes)
            assert math.isnan(odd.value)


async def test_a_watcher_stays_when_the_server_is_replaced(tmp_path):
    async with clients(tmp_path) as (runs, _), asyncio.timeout(30):
        async with served(tmp_path):
            run = await runs.create("first", SETTINGS)
            changes = runs.watch(run.id)
            await anext(changes)
        async with served(tmp_path), aclosing(changes):
            await runs.publish_version(run.id, 5)
            while (await anext(changes))[0].policy_version != 5:
                pass
