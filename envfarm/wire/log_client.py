"""Clients of the trajectory log: append until durable, subscribe to whole groups, commit.

Appending is safe to repeat, since the log tells records apart by id: batches that were not acknowledged are sent again
whenever the stream breaks. A subscription goes on after the last group it got.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType

import grpc
import grpc.aio

from envfarm.core.errors import FarmError, LogError, Unavailable
from envfarm.core.log import Appended, Group, LogCounts, LogRecord
from envfarm.core.trajectory import Purpose
from envfarm.wire.convert.records import group_from_pb, record_to_pb
from envfarm.wire.retry import backoff, following, passing, retrying
from envfarm.wire.status import from_rpc
from envfarm.wire.v1 import trajectory_pb2 as pb
from envfarm.wire.v1.trajectory_pb2_grpc import TrajectoryServiceStub

APPEND_SECONDS = 120.0
QUERY_SECONDS = 60.0
RECONNECT_SECONDS = 120.0
"""How long a subscription looks for a server before it gives up."""
_BATCH_BYTES = 2 * 1024 * 1024
_FLYING_BYTES = 16 * 1024 * 1024
_IDLE_SECONDS = 10.0


class LogClient:
    """Client of ``TrajectoryService``; an async context manager. The channel stays the caller's to close.

    All appends of one client share one stream, at most 16 MiB of it not yet acknowledged.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = TrajectoryServiceStub(channel)
        self._waiting: deque[_Batch] = deque()
        self._flying: deque[_Batch] = deque()
        self._more = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None
        self._trouble: FarmError | None = None

    async def __aenter__(self) -> LogClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the stream. Appends that still wait raise ``Unavailable``."""
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.cancel()
            await asyncio.wait((driver,))
        for batch in (*self._flying, *self._waiting):
            batch.fail(Unavailable("the client was closed before the log acknowledged"))
        self._flying.clear()
        self._waiting.clear()

    async def append(self, records: Sequence[LogRecord], *, timeout: float = APPEND_SECONDS) -> list[Appended]:
        """Returns when every record is on disk at the other side, in the order given.

        While the other side is away or its disk is full the records are sent again, for ``timeout`` seconds in all;
        then raises ``Unavailable`` or ``LogFull``. Raises ``LogError`` at once for a record that the log refuses.
        """
        batches = _batches(records)
        self._waiting.extend(batches)
        self._more.set()
        if batches and (self._driver is None or self._driver.done()):
            self._driver = asyncio.create_task(self._drive(), name="append stream")
        try:
            async with asyncio.timeout(timeout):
                answers = await asyncio.gather(*(batch.done for batch in batches))
        except TimeoutError:
            raise self._trouble or Unavailable(f"the log did not acknowledge within {timeout:g} s") from None
        return [appended for answer in answers for appended in answer]

    async def subscribe(
        self, run_id: str, consumer: str, *, purpose: Purpose = "train", after: int | None = None
    ) -> AsyncGenerator[Group, None]:
        """Whole groups of the run, in order, as they become whole; without end.

        Starts after position ``after``, by default after what ``consumer`` committed. Raises ``Unavailable`` when no
        server was there for two minutes. Closing the iterator (``aclosing``) ends the call.
        """
        position = after

        def start() -> grpc.aio.UnaryStreamCall[pb.SubscribeRequest, pb.SubscribeResponse]:
            request = pb.SubscribeRequest(run_id=run_id, consumer=consumer, purpose=purpose, after=position)
            return self._stub.Subscribe(request)

        async with aclosing(following(start, patience=RECONNECT_SECONDS)) as responses:
            async for response in responses:
                position = response.position
                yield group_from_pb(response)

    async def commit(self, run_id: str, consumer: str, position: int) -> None:
        """Note, durably, that ``consumer`` is done up to ``position``."""
        request = pb.CommitRequest(run_id=run_id, consumer=consumer, position=position)
        await retrying(lambda left: self._stub.Commit(request, timeout=left), timeout=QUERY_SECONDS)

    async def counts(self, run_id: str) -> LogCounts:
        """Totals of one run."""
        request = pb.CountRequest(run_id=run_id)
        answer = await retrying(lambda left: self._stub.Count(request, timeout=left), timeout=QUERY_SECONDS)
        return LogCounts(**{field: getattr(answer, field) for field in LogCounts.__struct_fields__})

    async def _drive(self) -> None:
        """Keep a stream while there is something to send; ends when it has been idle for a while."""
        attempt = 0
        while self._waiting:
            call = self._stub.Append()
            try:
                while await self._has_work():
                    await self._send(call)
                    await self._receive(call)
                    attempt, self._trouble = 0, None
                await call.done_writing()
            except (grpc.RpcError, asyncio.InvalidStateError) as error:  # the latter: the call ended meanwhile
                self._retreat(from_rpc(error) if isinstance(error, grpc.RpcError) else Unavailable(str(error)))
                await asyncio.sleep(backoff(attempt))
                attempt += 1
            finally:
                call.cancel()

    async def _has_work(self) -> bool:
        """Wait a while for something to send; whether there is."""
        if self._flying or self._waiting:
            return True
        self._more.clear()
        try:
            async with asyncio.timeout(_IDLE_SECONDS):
                await self._more.wait()
        except TimeoutError:
            return False
        return bool(self._waiting)

    async def _send(self, call: grpc.aio.StreamStreamCall[pb.AppendRequest, pb.AppendResponse]) -> None:
        """Write what waits, as far as the window allows; what nobody waits for any more is dropped."""
        while self._waiting:
            if self._waiting[0].done.done():
                self._waiting.popleft()
                continue
            if self._flying and sum(b.size for b in self._flying) + self._waiting[0].size > _FLYING_BYTES:
                return
            batch = self._waiting.popleft()
            try:
                message = pb.AppendRequest(records=[record_to_pb(record) for record in batch.records])
            except (TypeError, ValueError) as error:
                batch.fail(LogError(f"a record cannot be sent: {error}"))
                continue
            self._flying.append(batch)
            await call.write(message)

    async def _receive(self, call: grpc.aio.StreamStreamCall[pb.AppendRequest, pb.AppendResponse]) -> None:
        """Take the acknowledgement of the oldest batch in flight."""
        if not self._flying:
            return
        response = await call.read()
        if not isinstance(response, pb.AppendResponse):
            raise asyncio.InvalidStateError("the log ended the stream")
        self._flying.popleft().acknowledge(response)

    def _retreat(self, trouble: FarmError) -> None:
        """The stream broke: everything in flight waits again, except a batch that the log refused."""
        if self._flying and not passing(trouble):
            self._flying.popleft().fail(trouble)  # acknowledgements come in order: it was the oldest
        self._trouble = trouble
        self._waiting.extendleft(reversed(self._flying))
        self._flying.clear()


class _Batch:
    """Records that travel in one message, and the caller's wait for them."""

    __slots__ = ("done", "records", "size")

    def __init__(self, records: Sequence[LogRecord]) -> None:
        self.records = records
        self.size = sum(len(record.payload) for record in records)
        self.done: asyncio.Future[list[Appended]] = asyncio.get_running_loop().create_future()

    def acknowledge(self, response: pb.AppendResponse) -> None:
        """Hand the answer to the caller, unless it has gone."""
        if not self.done.done():
            again = set(response.duplicates)
            self.done.set_result([Appended(id=i, duplicate=i in again) for i in response.ids])

    def fail(self, error: FarmError) -> None:
        """Hand ``error`` to the caller, unless it has gone."""
        if not self.done.done():
            self.done.set_exception(error)


def _batches(records: Sequence[LogRecord]) -> list[_Batch]:
    """``records`` in order, split so that a message has about 2 MiB, or one record."""
    batches: list[_Batch] = []
    current: list[LogRecord] = []
    size = 0
    for record in records:
        if current and size + len(record.payload) > _BATCH_BYTES:
            batches.append(_Batch(current))
            current, size = [], 0
        current.append(record)
        size += len(record.payload)
    if current:
        batches.append(_Batch(current))
    return batches
