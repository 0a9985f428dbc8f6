"""The multiplexed stream, over a real gRPC server on a unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from envfarm.core.errors import (
    ConfigError,
    DeadlineExceeded,
    EnvironmentCodeError,
    StepConflict,
    Unavailable,
    WireError,
)
from envfarm.wire.auth import TokenInterceptor
from envfarm.wire.channel import connect, serve_options
from envfarm.wire.mux import MuxClient, serve
from envfarm.wire.v1 import episode_pb2, episode_pb2_grpc
from envfarm.wire.v1.episode_pb2 import Command, InteractRequest, InteractResponse, Reply


class Echo(episode_pb2_grpc.EpisodeServiceServicer):
    """Answers steps with their own index. The text of an action says what else to do."""

    def __init__(self, limit: int = 4096) -> None:
        self.limit = limit
        self.batches: list[int] = []
        self.started: list[int] = []
        self.hold = asyncio.Event()
        self.highest = 0
        self.running = 0

    def handle(self, command: Any, answer: Callable[[Any], None]) -> Any:
        text = command.step.text.text
        self.started.append(command.step.index)
        if text == "hold":
            return self.held(command)
        if text == "conflict":
            raise StepConflict("another action")
        if text == "bug":
            raise ZeroDivisionError("by zero")
        answer(self.reply(command))
        return None

    def reply(self, command: Any) -> Any:
        return Reply(step=episode_pb2.StepResponse(index=command.step.index))

    async def held(self, command: Any) -> Any:
        self.running += 1
        self.highest = max(self.highest, self.running)
        try:
            await self.hold.wait()
        finally:
            self.running -= 1
        return self.reply(command)

    async def Interact(self, request_iterator, context) -> None:
        async def counted() -> AsyncIterator[InteractRequest]:
            async for batch in request_iterator:
                self.batches.append(len(batch.commands))
                yield batch

        await serve(counted(), context, self.handle, response=InteractResponse, reply=Reply, limit=self.limit)


@asynccontextmanager
async def serving(path: Path, echo: Echo, token: str | None = None):
    interceptors = [TokenInterceptor(token)] if token else []
    server = grpc.aio.server(options=serve_options(), interceptors=interceptors)
    episode_pb2_grpc.add_EpisodeServiceServicer_to_server(echo, server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        yield server
    finally:
        await server.stop(None)


@asynccontextmanager
async def client(path: Path, token: str | None = None, limit: int = 8192):
    async with connect(f"unix:{path}", token=token) as channel:
        stub = episode_pb2_grpc.EpisodeServiceStub(channel)
        async with MuxClient("the echo", stub.Interact, InteractRequest, limit=limit) as mux:
            yield mux


def step(index: int, text: str = "") -> Command:
    return Command(step=episode_pb2.StepRequest(index=index, text=episode_pb2.TextAction(text=text)))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - of another process or of gRPC: there is no event
            await asyncio.sleep(0.001)


async def test_every_command_gets_its_own_reply_and_many_share_a_message(tmp_path):
    echo = Echo()
    async with serving(tmp_path / "s", echo), client(tmp_path / "s") as mux:
        replies = await asyncio.gather(*[mux.call(step(i), 10) for i in range(1000)])
        assert [r.step.index for r in replies] == list(range(1000))
        assert len(echo.batches) < 100
        assert mux.in_flight == 0


async def test_commands_start_in_the_order_in_which_they_were_sent(tmp_path):
    echo = Echo()
    async with serving(tmp_path / "s", echo), client(tmp_path / "s") as mux:
        await asyncio.gather(*[mux.call(step(i), 10) for i in range(500)])
        assert echo.started == list(range(500))


async def test_an_error_keeps_its_class_and_harms_no_other_command(tmp_path):
    async with serving(tmp_path / "s", Echo()), client(tmp_path / "s") as mux:
        texts = ["", "conflict", "", "bug", ""]
        results = await asyncio.gather(
            *[mux.call(step(i, text), 10) for i, text in enumerate(texts)], return_exceptions=True
        )
        assert isinstance(results[1], StepConflict)
        assert isinstance(results[3], WireError)
        assert "by zero" in str(results[3])
        assert [results[i].step.index for i in (0, 2, 4)] == [0, 2, 4]


async def test_slow_commands_do_not_hold_up_quick_ones(tmp_path):
    echo = Echo()
    async with serving(tmp_path / "s", echo), client(tmp_path / "s") as mux, asyncio.TaskGroup() as group:
        slow = group.create_task(mux.call(step(0, "hold"), 10))
        assert (await mux.call(step(1), 10)).step.index == 1
        assert not slow.done()
        echo.hold.set()


async def test_a_command_without_an_answer_fails_at_its_deadline(tmp_path):
    async with serving(tmp_path / "s", Echo()), client(tmp_path / "s") as mux:
        with pytest.raises(DeadlineExceeded, match="the echo has not answered in time"):
            await mux.call(step(0, "hold"), 0.05)
        assert mux.in_flight == 0
        assert (await mux.call(step(1), 10)).step.index == 1


async def test_a_lost_server_fails_everything_pending_at_once_with_the_cause(tmp_path):
    echo = Echo()
    async with serving(tmp_path / "s", echo) as server, client(tmp_path / "s") as mux:
        calls = [asyncio.create_task(mux.call(step(i, "hold"), 60)) for i in range(50)]
        await until(lambda: echo.running == 50)
        await server.stop(None)
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
        assert all(isinstance(r, Unavailable) and "the echo" in str(r) for r in results)


async def test_the_next_command_after_a_loss_opens_the_stream_again(tmp_path):
    async with client(tmp_path / "s") as mux:
        async with serving(tmp_path / "s", Echo()):
            await mux.call(step(0), 10)
        with pytest.raises(Unavailable):
            await mux.call(step(1), 10)
        async with serving(tmp_path / "s", Echo()), asyncio.timeout(10):
            while True:
                try:
                    reply = await mux.call(step(2), 10)
                    break
                except Unavailable:
                    await asyncio.sleep(0.02)
            assert reply.step.index == 2


async def test_the_server_reads_no_more_than_its_limit(tmp_path):
    echo = Echo(limit=8)
    async with serving(tmp_path / "s", echo), client(tmp_path / "s") as mux:
        calls = [asyncio.create_task(mux.call(step(i, "hold"), 30)) for i in range(100)]
        await until(lambda: echo.running == 8)
        echo.hold.set()
        await asyncio.gather(*calls)
        assert echo.highest == 8


async def test_the_client_waits_for_room_and_gives_up_at_the_deadline(tmp_path):
    echo = Echo()
    async with serving(tmp_path / "s", echo), client(tmp_path / "s", limit=1) as mux, asyncio.TaskGroup() as group:
        group.create_task(mux.call(step(0, "hold"), 10))
        await until(lambda: echo.running == 1)
        with pytest.raises(DeadlineExceeded, match="in flight"):
            await mux.call(step(1), 0.05)
        echo.hold.set()


async def test_a_command_too_large_to_send_fails_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("envfarm.wire.mux.batching.MOST_BYTES", 1000)
    monkeypatch.setattr("envfarm.wire.mux.batching.SPLIT_BYTES", 250)
    async with serving(tmp_path / "s", Echo()), client(tmp_path / "s") as mux:
        results = await asyncio.gather(
            *[mux.call(step(i, "x" * size), 10) for i, size in enumerate((300, 2000, 300))], return_exceptions=True
        )
        assert isinstance(results[1], ConfigError)
        assert "at most 1000" in str(results[1])
        assert [results[i].step.index for i in (0, 2)] == [0, 2]


async def test_a_cancelled_call_is_forgotten(tmp_path):
    echo = Echo()
    async with serving(tmp_path / "s", echo), client(tmp_path / "s") as mux:
        call = asyncio.create_task(mux.call(step(0, "hold"), 10))
        await until(lambda: echo.running == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert mux.in_flight == 0
        echo.hold.set()
        assert (await mux.call(step(1), 10)).step.index == 1


async def test_a_client_that_leaves_cancels_what_the_server_still_runs_for_it(tmp_path):
    echo = Echo()
    async with serving(tmp_path / "s", echo):
        async with client(tmp_path / "s") as mux:
            call = asyncio.create_task(mux.call(step(0, "hold"), 10))
            await until(lambda: echo.running == 1)
        with pytest.raises(Unavailable):
            await call
        await until(lambda: echo.running == 0)


@pytest.mark.parametrize("token", [None, "wrong"])
async def test_without_the_right_token_no_handler_is_called(tmp_path, token):
    echo = Echo()
    async with serving(tmp_path / "s", echo, token="right"):
        async with client(tmp_path / "s", token=token) as mux:
            with pytest.raises(WireError, match="no valid bearer token"):
                await mux.call(step(0), 10)
        assert echo.started == []
        async with client(tmp_path / "s", token="right") as mux:
            assert (await mux.call(step(3), 10)).step.index == 3


async def test_an_address_of_another_shape_is_named():
    with pytest.raises(ConfigError, match="'nonsense' is not an address"):
        connect("nonsense")


def test_an_environment_error_survives_the_wire():
    from envfarm.wire.status import from_status, to_status

    assert isinstance(from_status(to_status(EnvironmentCodeError("reset raised"))), EnvironmentCodeError)


async def test_one_stored_reply_can_answer_two_commands(tmp_path):
    class Stored(Echo):
        stored = Reply(step=episode_pb2.StepResponse(index=9))

        def reply(self, command):
            return self.stored

    async with serving(tmp_path / "s", Stored()), client(tmp_path / "s") as mux:
        replies = await asyncio.gather(*[mux.call(step(i), 10) for i in range(20)])
        assert [reply.step.index for reply in replies] == [9] * 20


async def test_those_who_wait_for_room_get_it_in_turn(tmp_path):
    echo = Echo()
    async with serving(tmp_path / "s", echo), client(tmp_path / "s", limit=2) as mux:
        replies = await asyncio.gather(*[mux.call(step(i), 10) for i in range(50)])
        assert [reply.step.index for reply in replies] == list(range(50))
        assert echo.started == list(range(50))
