"""One stream that carries many commands: whatever waits while a write is in flight goes into the next message.

Generic over the pairs ``Interact`` (``Command`` → ``Reply``) and ``Drive`` (``SlotCommand`` → ``SlotReply``): batch
messages have one repeated field, ``commands`` or ``replies``; commands and replies have an ``id`` and a one-of ``kind``
whose member ``error`` is a ``google.rpc.Status``. No timer is involved, so one lone command waits for nothing, and the
cost of gRPC's own work is shared by everything that is ready at the same time.

Both sides run commands through callbacks: a task per command costs more than the rest of its way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import grpc.aio
from google.rpc import status_pb2

from envfarm.core.errors import ConfigError, DeadlineExceeded, FarmError, Rejected, Unavailable
from envfarm.wire.channel import MESSAGE_BYTES
from envfarm.wire.status import from_rpc, from_status, to_status

log = logging.getLogger(__name__)
SPLIT_BYTES = MESSAGE_BYTES // 4
SWEEP_SECONDS = 0.1


class CommandMessage(Protocol):
    """A protobuf command."""

    @property
    def id(self) -> int:
        """Tells it from the others in flight."""
        ...

    def WhichOneof(self, oneof_group: Any, /) -> Any:  # noqa: N802 - protobuf's name
        """Name of the member of the one-of that is set."""
        ...


class ReplyMessage(CommandMessage, Protocol):
    """A protobuf reply."""

    @property
    def error(self) -> status_pb2.Status:
        """Set when the command failed."""
        ...


C = TypeVar("C", bound=CommandMessage)
R = TypeVar("R", bound=ReplyMessage)
Done = Callable[[R | FarmError], None]
Answer = Callable[[R], None]
Handler = Callable[[C, Answer[R]], Coroutine[Any, Any, R] | None]


def _batches(make: Callable[[], Any], field: str, items: list[tuple[int, Any]]) -> Iterable[tuple[Any, int, int]]:
    """Messages that hold ``items`` in order, none much larger than it must be; each with its count and its bytes.

    Ids are set on the copies, so that one stored reply can answer two commands.
    """
    message = make()
    add = getattr(message, field).add
    for number, item in items:
        copy = add()
        copy.CopyFrom(item)  # less than half the cost of handing the list to the constructor
        copy.id = number
    size = message.ByteSize()
    if len(items) > 1 and size > SPLIT_BYTES:
        middle = len(items) // 2
        yield from _batches(make, field, items[:middle])
        yield from _batches(make, field, items[middle:])
    else:
        yield message, len(items), size


async def _gathered(count: Callable[[], int], in_flight: int) -> None:
    """Returns when everything in flight is there, or a turn of the event loop has added nothing.

    So a lone command leaves at once, and what comes in bursts leaves in one message.
    """
    before = -1
    while before < (now := count()) < in_flight:
        before = now
        await asyncio.sleep(0)


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
                await _gathered(lambda: len(self._queue), len(self._pending))
                self._ready.clear()
                commands, self._queue = self._queue, []
                for message, _, size in _batches(self._request, "commands", commands):
                    if size > MESSAGE_BYTES:
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
            _finish(done, ConfigError(f"a command of {size} bytes; at most {MESSAGE_BYTES} can be sent"))

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


async def serve(
    requests: AsyncIterator[Any],
    context: Any,
    handler: Handler[C, R],
    *,
    response: Callable[..., Any],
    reply: Callable[..., R],
    limit: int = 4096,
) -> None:
    """Server side: the whole body of ``Interact`` or ``Drive`` (a coroutine method, not a generator).

    ``handler(command, answer)`` either calls ``answer(reply)`` (at once or later, from the loop, exactly once) and
    returns ``None``, or returns a coroutine (an ``async def`` does) whose result is the reply. Ids are set here. What
    it raises becomes the reply's ``error``. ``response`` and ``reply`` are the message classes (``InteractResponse``,
    ``Reply``).

    Commands are begun in the order in which they came. At most ``limit`` are between read and written reply: beyond
    that nothing is read, and HTTP/2 flow control makes the client wait. When the stream breaks, coroutines that still
    run are cancelled: shield what must finish.
    """
    stream: _Serving[C, R] = _Serving(handler, response, reply, limit)
    async with asyncio.TaskGroup() as tasks:
        writer = tasks.create_task(stream.write(context))
        try:
            async for batch in requests:
                for command in batch.commands:
                    stream.begin(command, tasks)
                    if stream.in_flight >= limit:
                        await stream.below(limit)
            await stream.below(1)
        finally:
            writer.cancel()


class _Serving(Generic[C, R]):
    """State of one served stream."""

    def __init__(
        self, handler: Handler[C, R], response: Callable[..., Any], reply: Callable[..., R], limit: int
    ) -> None:
        self._handler = handler
        self._response = response
        self._reply = reply
        self._limit = limit
        self._out: list[tuple[int, R]] = []
        self._ready = asyncio.Event()
        self._room = asyncio.Event()
        self._broken = False
        self.in_flight = 0

    async def below(self, count: int) -> None:
        """Wait until fewer than ``count`` commands are in flight, or nobody takes replies any more."""
        while self.in_flight >= count and not self._broken:
            self._room.clear()
            await self._room.wait()

    def begin(self, command: C, tasks: asyncio.TaskGroup) -> None:
        """Start one command."""
        number = command.id
        self.in_flight += 1
        try:
            running = self._handler(command, partial(self._answer, number))
        except Exception as error:
            self._fail(number, error)
            return
        if running is not None:
            tasks.create_task(self._await(number, running))

    async def _await(self, number: int, running: Coroutine[Any, Any, R]) -> None:
        try:
            self._answer(number, await running)
        except asyncio.CancelledError:
            self._fail(number, Unavailable("the command was cancelled"))
            raise
        except Exception as error:
            self._fail(number, error)

    def _answer(self, number: int, reply: R) -> None:
        self._out.append((number, reply))
        self._ready.set()

    def _fail(self, number: int, error: Exception) -> None:
        if not isinstance(error, FarmError):
            log.error("a command failed unexpectedly", exc_info=error)
        self._answer(number, self._reply(error=to_status(error)))

    async def write(self, context: Any) -> None:
        """Send replies until cancelled or until the other side is gone."""
        try:
            while True:
                await self._ready.wait()
                await _gathered(lambda: len(self._out), self.in_flight)
                self._ready.clear()
                replies, self._out = self._out, []
                for message, count, size in _batches(self._response, "replies", replies):
                    await context.write(message if size <= MESSAGE_BYTES else self._oversized(message, size))
                    self.in_flight -= count
                self._room.set()
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            log.info("a stream broke while replies were written: %s", error)
        finally:
            self._broken = True
            self._room.set()

    def _oversized(self, message: Any, size: int) -> Any:
        error = ConfigError(f"a reply of {size} bytes; at most {MESSAGE_BYTES} can be sent")
        return self._response(replies=[self._reply(id=message.replies[0].id, error=to_status(error))])
