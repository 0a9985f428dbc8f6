"""The client side of a multiplexed stream."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic

import grpc.aio

from envfarm.core.errors import ConfigError, DeadlineExceeded, FarmError, Rejected, Unavailable
from envfarm.wire.mux import batching
from envfarm.wire.mux.batching import C, R, batches, gathered
from envfarm.wire.status import from_rpc, from_status

log = logging.getLogger(__name__)
SWEEP_SECONDS = 0.1
Done = Callable[[R | FarmError], None]


class MuxClient(Generic[C, R]):
    """Client side; an async context manager.

    ``open_stream`` starts the RPC (``stub.Interact``); ``request`` is the batch message (``InteractRequest``).
    The stream opens with the first command and again with the first one after a failure. When it breaks, every
    pending command fails at once with :class:`Unavailable` and the cause; whether to send again is the caller's
    decision. ``limit`` bounds the commands in flight: :meth:`call` waits for room, :meth:`submit` refuses.
    """

    def __init__(
        self,
        peer: str,
        open_stream: Callable[[], grpc.aio.StreamStreamCall[Any, Any]],
        request: Callable[..., Any],
        *,
        limit: int = 8192,
    ) -> None:
        self._peer = peer
        self._open_stream = open_stream
        self._request = request
        self._limit = limit
        self._room: deque[asyncio.Future[None]] = deque()  # those who wait for room
        self._pending: dict[int, tuple[Done[R], float]] = {}  # by id: whom to tell, and the deadline
        self._sweeper: asyncio.TimerHandle | None = None
        self._queue: list[tuple[int, C]] = []
        self._ready = asyncio.Event()
        self._next = 0
        self._runner: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def in_flight(self) -> int:
        """Commands without a reply yet."""
        return len(self._pending)

    async def __aenter__(self) -> MuxClient[C, R]:
        self._runner = asyncio.create_task(self._run(), name=f"mux to {self._peer}")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])
            self._runner = None
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._fail_all(Unavailable(f"the connection to {self._peer} was closed here"))

    async def call(self, command: C, timeout: float) -> R:
        """The reply to ``command``, whose id is chosen here.

        Raises the error that the reply carries, :class:`DeadlineExceeded` after ``timeout`` seconds,
        :class:`Unavailable` when the stream breaks.
        """
        if len(self._pending) >= self._limit:
            timeout = await self._until_room(timeout)
        future: asyncio.Future[R] = self._loop.create_future()
        number = self.submit(command, timeout, partial(_settle, future))
        try:
            return await future
        except asyncio.CancelledError:
            self._take(number)
            raise

    def submit(self, command: C, timeout: float, done: Done[R]) -> int:
        """Send ``command``; ``done`` is called exactly once, from the loop, with the reply or the error.

        Never calls ``done`` before it returns. Deadlines are kept to a tenth of a second. Raises
        :class:`Unavailable` when too much is in flight or the client is closed.
        """
        if self._runner is None or len(self._pending) >= 2 * self._limit:
            why = "closed" if self._runner is None else f"full: {len(self._pending)} commands in flight"
            raise Unavailable(f"the connection to {self._peer} is {why}")
        self._next = number = self._next + 1
        self._pending[number] = (done, self._loop.time() + timeout)
        self._queue.append((number, command))
        self._ready.set()
        if self._sweeper is None:  # one timer for all: a timer each would cost more than the dictionary
            self._sweeper = self._loop.call_later(min(timeout, SWEEP_SECONDS), self._sweep)
        return number

    async def _until_room(self, timeout: float) -> float:
        """Wait, in line, until less than the limit is in flight; returns what is left of ``timeout``."""
        start = self._loop.time()
        place: asyncio.Future[None] = self._loop.create_future()
        self._room.append(place)
        try:
            async with asyncio.timeout(timeout):
                await place
        except TimeoutError:
            raise DeadlineExceeded(f"{self._peer}: {self._limit} commands in flight for {timeout:g} s") from None
        except asyncio.CancelledError:
            self._let_in()  # should it have been this one's turn
            raise
        return timeout - (self._loop.time() - start)

    def _take(self, number: int) -> Done[R] | None:
        """Whom to tell of the end of a command; ``None`` when its end was told already. Lets the next in line go."""
        entry = self._pending.pop(number, None)
        if self._room:
            self._let_in()
        return entry[0] if entry is not None else None

    def _let_in(self) -> None:
        while self._room and len(self._pending) < self._limit:
            place = self._room.popleft()
            if not place.done():
                place.set_result(None)
                return

    def _sweep(self) -> None:
        """Fail what has passed its deadline."""
        now = self._loop.time()
        for number in [number for number, (_, deadline) in self._pending.items() if deadline <= now]:
            done = self._take(number)
            if done is not None:
                _finish(done, DeadlineExceeded(f"{self._peer} has not answered in time"))
        self._sweeper = self._loop.call_later(SWEEP_SECONDS, self._sweep) if self._pending else None

    def _fail_all(self, error: FarmError) -> None:
        self._queue = []
        for number in list(self._pending):
            done = self._take(number)
            if done is not None:
                _finish(done, error)

    async def _run(self) -> None:
        while True:
            await self._ready.wait()
            error = await self._stream()
            self._ready.clear()
            self._fail_all(error)

    async def _stream(self) -> FarmError:
        """Serve one stream until it breaks; returns the cause."""
        try:
            call = self._open_stream()
        except Exception as failure:
            return Unavailable(f"cannot reach {self._peer}: {failure}")
        writer = asyncio.create_task(self._write(call), name=f"mux writer to {self._peer}")
        try:
            await self._read(call)
            return Unavailable(f"{self._peer} closed the stream")
        except grpc.RpcError as failure:
            error = from_rpc(failure)
            kind = type(error) if isinstance(error, Rejected) else Unavailable  # whatever broke it may be mended
            return kind(f"lost {self._peer}: {error}")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return Unavailable(f"the stream to {self._peer} was cancelled")
        finally:
            call.cancel()
            writer.cancel()
            await asyncio.wait([writer])

    async def _write(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        try:
            while True:
                await self._ready.wait()
                await gathered(lambda: len(self._queue), len(self._pending))
                self._ready.clear()
                commands, self._queue = self._queue, []
                for message, _, size in batches(self._request, "commands", commands):
                    if size > batching.MOST_BYTES:
                        self._refuse(message.commands[0].id, size)
                    else:
                        await call.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the reader learns the cause
        except Exception:
            log.exception("writing to %s failed", self._peer)
            call.cancel()

    def _refuse(self, number: int, size: int) -> None:
        done = self._take(number)
        if done is not None:
            _finish(done, ConfigError(f"a command of {size} bytes; at most {batching.MOST_BYTES} can be sent"))

    async def _read(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        while True:
            batch: Any = await call.read()
            if batch is grpc.aio.EOF:
                return
            for reply in batch.replies:
                done = self._take(reply.id)
                if done is not None:  # else it timed out or was given up meanwhile
                    _finish(done, from_status(reply.error) if reply.WhichOneof("kind") == "error" else reply)


def _settle(future: asyncio.Future[R], result: R | FarmError) -> None:
    if future.done():
        return
    if isinstance(result, FarmError):
        future.set_exception(result)
    else:
        future.set_result(result)


def _finish(done: Callable[[Any], None], result: Any) -> None:
    try:
        done(result)
    except Exception:
        log.exception("a callback for a reply failed")  # nothing of one command may break the stream of the others
