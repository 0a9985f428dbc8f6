# ruff: noqa: N802 - methods have gRPC's names
"""``EpisodeService``: unary calls and ``Interact``, both over :class:`envfarm.gateway.episodes.Episodes`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import grpc.aio

from envfarm.core.errors import ConfigError, FarmError
from envfarm.gateway.episodes import Episodes
from envfarm.wire import mux
from envfarm.wire.convert.tasks import task_to_pb
from envfarm.wire.status import reported, to_status
from envfarm.wire.v1 import episode_pb2 as pb
from envfarm.wire.v1.episode_pb2_grpc import EpisodeServiceServicer

Context = grpc.aio.ServicerContext[Any, Any]
Answer = Callable[[pb.Reply], None]


class EpisodeServicer(EpisodeServiceServicer):
    """Serves one :class:`Episodes`. Names and arguments are gRPC's."""

    def __init__(self, episodes: Episodes) -> None:
        self._episodes = episodes

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        """What an environment offers."""
        async with reported(context):
            return pb.DescribeResponse(environments=[s.pb for s in self._episodes.describe(request.environment)])

    async def Tasks(self, request: pb.TasksRequest, context: Context) -> pb.TasksResponse:
        """A page of tasks."""
        async with reported(context):
            page = await self._episodes.tasks(request.environment, request.split, request.offset, request.limit)
            return pb.TasksResponse(tasks=[task_to_pb(task) for task in page])

    async def Open(self, request: pb.OpenRequest, context: Context) -> pb.OpenResponse:
        """Start an episode."""
        async with reported(context):
            return await self._episodes.open(request, _left(context))

    async def Step(self, request: pb.StepRequest, context: Context) -> pb.StepResponse:
        """Take a step."""
        async with reported(context):
            return await self._step(request, _left(context))

    async def Close(self, request: pb.CloseRequest, context: Context) -> pb.CloseResponse:
        """End an episode."""
        async with reported(context):
            return await self._episodes.close(request, _left(context))

    async def Interact(  # type: ignore[override]  # a coroutine that writes, not a generator
        self, request_iterator: AsyncIterator[pb.InteractRequest], context: Context
    ) -> None:
        """Commands of many episodes on one stream."""
        await mux.serve(request_iterator, context, self._begin, response=pb.InteractResponse, reply=pb.Reply)

    def _begin(self, command: pb.Command, answer: Answer) -> Coroutine[Any, Any, pb.Reply] | None:
        kind = command.WhichOneof("kind")
        if kind == "step":
            reply = pb.Reply()
            self._episodes.step(command.step, reply.step, command.timeout_s, partial(_answer_step, answer, reply))
            return None
        if kind == "open":
            return self._open(command)
        if kind == "close":
            return self._close(command)
        if kind == "touch":
            return self._touch(command)
        raise ConfigError("a command without a kind that this gateway knows; is the client newer?")

    async def _open(self, command: pb.Command) -> pb.Reply:
        return pb.Reply(open=await self._episodes.open(command.open, command.timeout_s))

    async def _close(self, command: pb.Command) -> pb.Reply:
        return pb.Reply(close=await self._episodes.close(command.close, command.timeout_s))

    async def _touch(self, command: pb.Command) -> pb.Reply:
        return pb.Reply(touch=await self._episodes.touch(command.touch, command.timeout_s))

    async def _step(self, request: pb.StepRequest, timeout: float) -> pb.StepResponse:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: FarmError | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(None)

        response = pb.StepResponse()
        self._episodes.step(request, response, timeout, done)
        await future
        return response


def _answer_step(answer: Answer, reply: pb.Reply, error: FarmError | None) -> None:
    if error is not None:
        reply.error.CopyFrom(to_status(error))
    answer(reply)


def _left(context: Context) -> float:
    """Seconds until the client gives up; 0 when it set no deadline."""
    left = context.time_remaining()
    return max(left, 0.001) if left is not None else 0.0
