# ruff: noqa: N802 - methods have gRPC's names
"""``TrajectoryService``: trajectories in, acknowledged when durable; whole groups out, as fast as they are taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc.aio
import msgspec

from envfarm.core.errors import ConfigError, FarmError, LogError
from envfarm.core.log import Appended, TrajectoryLog
from envfarm.core.trajectory import PURPOSES, Purpose
from envfarm.storage.budget import ByteBudget
from envfarm.wire.convert.records import group_to_pb, record_from_pb
from envfarm.wire.status import abort, reported
from envfarm.wire.v1 import trajectory_pb2 as pb
from envfarm.wire.v1.trajectory_pb2_grpc import TrajectoryServiceServicer

_STREAM_BYTES = 16 * 1024 * 1024
_STREAM_BATCHES = 64
_STORE_SECONDS = 120.0
_GROUPS_AT_ONCE = 8
_LOOK_SECONDS = 30.0

Stored = Sequence[Appended] | FarmError
AppendContext = grpc.aio.ServicerContext[pb.AppendRequest, pb.AppendResponse]


class TrajectoryServicer(TrajectoryServiceServicer):
    """Serves one ``TrajectoryLog``."""

    def __init__(self, log: TrajectoryLog) -> None:
        self._log = log

    async def Append(  # type: ignore[override]  # a coroutine that writes, not a generator
        self, request_iterator: AsyncIterator[pb.AppendRequest], context: AppendContext
    ) -> None:
        """Store batches side by side, acknowledge them in order.

        Reads on only while less than 16 MiB of this stream is not durable: a slow disk slows the sender. The first
        batch that fails ends the stream with its cause.
        """
        storing: asyncio.Queue[asyncio.Task[Stored] | None] = asyncio.Queue(_STREAM_BATCHES)
        failure: FarmError | None = None
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(self._read(request_iterator, storing, group))
            while (task := await storing.get()) is not None:
                stored = await task
                if isinstance(stored, FarmError):
                    failure = stored
                    reader.cancel()
                    break
                await context.write(_acknowledgement(stored))
        if failure is not None:
            await abort(context, failure)

    async def Subscribe(
        self,
        request: pb.SubscribeRequest,
        context: grpc.aio.ServicerContext[pb.SubscribeRequest, pb.SubscribeResponse],
    ) -> AsyncIterator[pb.SubscribeResponse]:
        """Push whole groups from the given or committed position on; waits while the reader does not take them."""
        async with reported(context):
            purpose = _purpose(request.purpose)
            after = await self._start(request)
            await context.send_initial_metadata(())
            while True:
                groups = await self._log.groups(
                    request.run_id, purpose=purpose, after=after, limit=_GROUPS_AT_ONCE, timeout=_LOOK_SECONDS
                )
                for group in groups:
                    yield group_to_pb(group)
                    after = group.position

    async def Commit(
        self, request: pb.CommitRequest, context: grpc.aio.ServicerContext[pb.CommitRequest, pb.CommitResponse]
    ) -> pb.CommitResponse:
        """Note a position."""
        async with reported(context):
            await self._log.commit(request.run_id, request.consumer, request.position)
            return pb.CommitResponse()

    async def Count(
        self, request: pb.CountRequest, context: grpc.aio.ServicerContext[pb.CountRequest, pb.CountResponse]
    ) -> pb.CountResponse:
        """Totals of a run."""
        async with reported(context):
            counts = await self._log.counts(request.run_id)
            return pb.CountResponse(**msgspec.structs.asdict(counts))

    async def _start(self, request: pb.SubscribeRequest) -> int:
        if request.HasField("after"):
            return request.after
        return await self._log.committed(request.run_id, request.consumer)

    async def _read(
        self,
        requests: AsyncIterator[pb.AppendRequest],
        storing: asyncio.Queue[asyncio.Task[Stored] | None],
        group: asyncio.TaskGroup,
    ) -> None:
        room = ByteBudget(_STREAM_BYTES)
        async for request in requests:
            size = sum(len(record.payload) for record in request.records)
            await room.take(size, timeout=_STORE_SECONDS)
            await storing.put(group.create_task(self._store(request, room, size)))
        await storing.put(None)

    async def _store(self, request: pb.AppendRequest, room: ByteBudget, size: int) -> Stored:
        """What became of a batch; failures are returned, so that those before it can still be acknowledged."""
        try:
            async with asyncio.timeout(_STORE_SECONDS):
                return await self._log.append([record_from_pb(record) for record in request.records])
        except FarmError as error:
            return error
        except TimeoutError:
            return LogError(f"the log did not store a batch within {_STORE_SECONDS:g} s; send it again")
        finally:
            room.give(size)


def _acknowledgement(stored: Sequence[Appended]) -> pb.AppendResponse:
    return pb.AppendResponse(ids=[a.id for a in stored], duplicates=[a.id for a in stored if a.duplicate])


def _purpose(name: str) -> Purpose:
    if name and name not in PURPOSES:
        raise ConfigError(f"purpose {name!r}; expected one of {', '.join(PURPOSES)}")
    return name or "train"
