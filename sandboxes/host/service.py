# ruff: noqa: N802, ARG002 - methods have gRPC's names and arguments
"""``HostService``: what the gateway speaks to this host."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from envfarm.core.errors import ConfigError, EnvironmentCodeError
from envfarm.wire import mux
from envfarm.wire.convert.episodes import info_to_pb
from envfarm.wire.convert.tasks import task_to_pb
from envfarm.wire.status import reported
from envfarm.wire.v1 import host_pb2, host_pb2_grpc
from sandboxes.host.environments import Environments
from sandboxes.host.slots import Answer, Slots
from sandboxes.host.task_pages import TaskPages


class HostServicer(host_pb2_grpc.HostServiceServicer):
    """Serves slots and tasks, and notes when a gateway was last in contact."""

    def __init__(self, host_id: str, environments: Environments, slots: Slots, pages: TaskPages) -> None:
        self._id = host_id
        self._environments = environments
        self._slots = slots
        self._pages = pages
        self._streams = 0
        self._seen = time.monotonic()
        self.drained = asyncio.Event()
        self.grace = 0.0  # seconds that what runs may take when the host is told to end
        self.hurried = False  # told to by a signal: episodes need not be played out

    def silence(self) -> float:
        """Seconds since a gateway was last in contact; 0 while one holds a stream."""
        return 0.0 if self._streams else time.monotonic() - self._seen

    async def Inspect(self, request: host_pb2.InspectRequest, context: Any) -> host_pb2.InspectResponse:
        """Environments, slots, isolation."""
        self._seen = time.monotonic()
        return host_pb2.InspectResponse(
            host_id=self._id,
            environments=[info_to_pb(info) for info in self._environments.infos],
            slots=len(self._slots),
            busy=self._slots.busy,
            quarantined=self._slots.quarantined,
            broken=self._environments.broken,
            unfit=self._slots.unfit,
            image=self._environments.image,
        )

    async def ListTasks(self, request: host_pb2.ListTasksRequest, context: Any) -> host_pb2.ListTasksResponse:
        """A page of an environment's tasks."""
        self._seen = time.monotonic()
        async with reported(context):
            return await self._page(request)

    async def _page(self, request: host_pb2.ListTasksRequest) -> host_pb2.ListTasksResponse:
        loaded = self._environments.get(request.environment)
        tasks = await self._pages.page(loaded, request.split, request.offset, request.limit)
        try:
            return host_pb2.ListTasksResponse(tasks=[task_to_pb(task) for task in tasks])
        except (TypeError, ValueError) as error:
            raise EnvironmentCodeError(
                f"environment {loaded.name!r}: a task cannot be sent: {error}; task data must survive JSON"
            ) from error

    async def Drive(  # type: ignore[override]  # a coroutine that writes, not a generator
        self, request_iterator: AsyncIterator[host_pb2.DriveRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Slot commands of many episodes on one stream."""
        self._streams += 1
        try:
            await mux.serve(
                request_iterator,
                context,
                self._command,
                response=host_pb2.DriveResponse,
                reply=host_pb2.SlotReply,
                limit=max(4096, 4 * len(self._slots)),
            )
        finally:
            self._streams -= 1
            self._seen = time.monotonic()

    async def Drain(self, request: host_pb2.DrainRequest, context: Any) -> host_pb2.DrainResponse:
        """Finish what runs, take no new slot, then exit."""
        self.grace = request.grace_s
        self._slots.draining = True
        self.drained.set()
        return host_pb2.DrainResponse()

    def _command(self, command: host_pb2.SlotCommand, answer: Answer) -> None:
        kind = command.WhichOneof("kind")
        if kind == "step":
            self._slots.step(command.step, answer)
        elif kind == "acquire":
            self._slots.acquire(command.acquire, answer)
        elif kind == "release":
            self._slots.release(command.release.episode_id, answer)
        elif kind == "touch":
            self._slots.touch(command.touch.episode_ids, answer)
        else:
            raise ConfigError("a slot command without a kind that this host knows")
