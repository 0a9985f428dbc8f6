"""The server side of a multiplexed stream: the whole body of ``Interact`` or ``Drive``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, Generic

import grpc.aio

from envfarm.core.errors import ConfigError, FarmError, Unavailable
from envfarm.wire.mux import batching
from envfarm.wire.mux.batching import C, R, batches, gathered
from envfarm.wire.status import to_status

log = logging.getLogger(__name__)
Answer = Callable[[R], None]
Handler = Callable[[C, Answer[R]], Coroutine[Any, Any, R] | None]


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
                await gathered(lambda: len(self._out), self.in_flight)
                self._ready.clear()
                replies, self._out = self._out, []
                for message, count, size in batches(self._response, "replies", replies):
                    await context.write(message if size <= batching.MOST_BYTES else self._oversized(message, size))
                    self.in_flight -= count
                self._room.set()
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            log.info("a stream broke while replies were written: %s", error)
        finally:
            self._broken = True
            self._room.set()

    def _oversized(self, message: Any, size: int) -> Any:
        error = ConfigError(f"a reply of {size} bytes; at most {batching.MOST_BYTES} can be sent")
        return self._response(replies=[self._reply(id=message.replies[0].id, error=to_status(error))])
