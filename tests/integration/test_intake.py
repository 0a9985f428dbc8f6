"""The trajectory log over gRPC: acknowledged when durable, pushed whole, resumed after a server is gone."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from envfarm.core.errors import ConfigError, LogError, Unavailable
from envfarm.core.log import LogRecord
from envfarm.core.outcome import Outcome
from envfarm.core.trajectory import TrajectoryHeader
from envfarm.gateway.intake import TrajectoryServicer
from envfarm.trajectories.sqlite_log import SqliteLog
from envfarm.wire.channel import connect, serve_options
from envfarm.wire.log_client import LogClient
from envfarm.wire.v1.trajectory_pb2_grpc import add_TrajectoryServiceServicer_to_server


def record(group: int, member: int = 0, *, size: int = 1, run: str = "run", payload: bytes = b"x") -> LogRecord:
    return LogRecord(
        header=TrajectoryHeader(
            id=f"{run}-{group}-{member}",
            run_id=run,
            group_id=f"{run}/{group}",
            group_size=size,
            member=member,
            attempt=0,
            final=True,
            purpose="train",
            environment="stockroom@1",
            outcome=Outcome.completed(),
            reward=None,
            steps=2,
            sampled_tokens=40,
            oldest_version=None,
            ended_at=1.5,
        ),
        payload=payload,
    )


@asynccontextmanager
async def served(folder: Path):
    """A server with a log on a socket in ``folder``, and a channel to it."""
    log = SqliteLog(folder / "farm.db")
    server = grpc.aio.server(options=serve_options())
    add_TrajectoryServiceServicer_to_server(TrajectoryServicer(log), server)
    address = f"unix:{folder}/socket"
    server.add_insecure_port(address)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)
        await log.close()


async def take(client: LogClient, count: int, **how):
    """The first ``count`` groups of a subscription."""
    found = []
    async with asyncio.timeout(20), aclosing(client.subscribe("run", "trainer", **how)) as groups:
        async for group in groups:
            found.append(group)
            if len(found) == count:
                break
    return found


async def test_appended_records_come_back_as_whole_groups_in_order(tmp_path):
    async with served(tmp_path) as address, connect(address) as channel, LogClient(channel) as client:
        answers = await client.append(
            [record(g, m, size=2, payload=b"p%d%d" % (g, m)) for g in range(3) for m in (1, 0)]
        )
        assert [a.duplicate for a in answers] == [False] * 6
        groups = await take(client, 3)
        assert [g.position for g in groups] == [1, 2, 3]
        assert [[r.payload for r in g.records] for g in groups] == [[b"p%d0" % g, b"p%d1" % g] for g in range(3)]
        assert groups[0].records[0] == record(0, 0, size=2, payload=b"p00")
        assert groups[0].records[0].header.reward is None
        assert groups[0].records[0].header.oldest_version is None


async def test_a_repeated_append_is_acknowledged_as_duplicate_and_stored_once(tmp_path):
    async with served(tmp_path) as address, connect(address) as channel, LogClient(channel) as client:
        await client.append([record(0)])
        (again,) = await client.append([record(0)])
        assert again.duplicate
        assert (await client.counts("run")).records == 1


async def test_many_concurrent_appends_share_a_stream_and_are_all_acknowledged(tmp_path):
    async with served(tmp_path) as address, connect(address) as channel, LogClient(channel) as client:
        payload = bytes(300_000)
        answers = await asyncio.gather(*(client.append([record(g, payload=payload)]) for g in range(100)))
        assert [a.id for (a,) in answers] == [f"run-{g}-0" for g in range(100)]
        assert (await client.counts("run")).bytes == 100 * 300_000


async def test_a_subscription_waits_for_groups_and_starts_after_the_committed_position(tmp_path):
    async with served(tmp_path) as address, connect(address) as channel, LogClient(channel) as client:
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(take(client, 1))
            await client.append([record(0)])
        assert first.result()[0].position == 1
        await client.append([record(1)])
        await client.commit("run", "trainer", 1)
        assert (await take(client, 1))[0].position == 2
        assert (await take(client, 1, after=0))[0].position == 1


async def test_a_subscription_goes_on_where_it_was_when_the_server_is_replaced(tmp_path):
    async with (
        asyncio.timeout(20),
        connect(f"unix:{tmp_path}/socket") as channel,
        LogClient(channel) as client,
        aclosing(client.subscribe("run", "trainer")) as groups,
    ):
        async with served(tmp_path):
            await client.append([record(0), record(1)])
            assert [(await anext(groups)).position for _ in range(2)] == [1, 2]
        async with served(tmp_path):
            await client.append([record(2)])
            assert (await anext(groups)).position == 3


async def test_an_append_waits_for_a_server_that_comes_later(tmp_path):
    async with connect(f"unix:{tmp_path}/socket") as channel, LogClient(channel) as client:
        async with asyncio.TaskGroup() as tasks:
            append = tasks.create_task(client.append([record(0)], timeout=20))
            async with served(tmp_path):
                (answer,) = await append
        assert answer.id == "run-0-0"


async def test_an_append_gives_up_with_the_cause_when_no_server_comes(tmp_path):
    async with connect(f"unix:{tmp_path}/socket") as channel, LogClient(channel) as client:
        with pytest.raises(Unavailable):
            await client.append([record(0)], timeout=0.3)


async def test_a_refused_record_fails_alone_while_those_around_it_are_stored(tmp_path):
    async with served(tmp_path) as address, connect(address) as channel, LogClient(channel) as client:
        bad = record(1, member=7, size=2)
        answers = await asyncio.gather(
            client.append([record(0)]), client.append([bad]), client.append([record(2)]), return_exceptions=True
        )
        assert isinstance(answers[1], LogError)
        assert "member 7 of a group of 2" in str(answers[1])
        assert [a[0].id for a in (answers[0], answers[2])] == ["run-0-0", "run-2-0"]
        assert (await client.counts("run")).records == 2


async def test_a_record_that_no_message_can_carry_fails_alone_and_at_once(tmp_path):
    async with served(tmp_path) as address, connect(address) as channel, LogClient(channel) as client:
        with pytest.raises(LogError, match="cannot be sent"):
            await client.append([record(0, member=-1)], timeout=5)
        assert [a.id for a in await client.append([record(1)], timeout=5)] == ["run-1-0"]


async def test_an_unknown_purpose_is_refused(tmp_path):
    async with served(tmp_path) as address, connect(address) as channel, LogClient(channel) as client:
        with pytest.raises(ConfigError, match="expected one of train"):
            await take(client, 1, purpose="nonsense")


async def test_a_cancelled_append_leaves_the_stream_fit_for_use(tmp_path):
    async with served(tmp_path) as address, connect(address) as channel, LogClient(channel) as client:
        tasks = [asyncio.ensure_future(client.append([record(g)])) for g in range(20)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        (answer,) = await client.append([record(99)])
        assert not answer.duplicate


async def test_closing_the_client_tells_those_who_wait(tmp_path):
    async with connect(f"unix:{tmp_path}/socket") as channel:
        client = LogClient(channel)
        waiting = asyncio.ensure_future(client.append([record(0)]))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(Unavailable, match="closed"):
            await waiting


async def test_a_reader_that_does_not_read_gets_the_groups_later_and_in_order(tmp_path):
    async with served(tmp_path) as address, connect(address) as channel, LogClient(channel) as client:
        payload = bytes(1_000_000)
        async with aclosing(client.subscribe("run", "trainer", after=0)) as groups:
            await client.append([record(0, payload=payload)])
            assert (await anext(groups)).position == 1
            await client.append([record(g, payload=payload) for g in range(1, 40)])
            assert [(await anext(groups)).position for _ in range(39)] == list(range(2, 41))
