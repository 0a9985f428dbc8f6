"""The engine's thread: runs the scheduler, and carries requests in and results out in batches."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from envfarm.core.errors import EngineError
from envfarm.inference.embedded.request import Request
from envfarm.inference.embedded.scheduler import Scheduler

T = TypeVar("T")
log = logging.getLogger(__name__)


class QueueFull(EngineError):
    """The waiting queue is at its limit."""

    code = "engine_queue_full"


class EngineStopped(EngineError):
    """The engine ends or has failed; another one, or this one after a restart, can serve the same request."""

    code = "engine_stopped"


class DuplicateRequest(EngineError):
    """A request of this rid is still live."""

    code = "engine_duplicate"


class EngineThread:
    """Lets an event loop use a :class:`Scheduler`. All methods are for the loop that :meth:`start` was called in."""

    def __init__(self, scheduler: Scheduler, *, max_queued: int) -> None:
        self.scheduler = scheduler
        self._max_queued = max_queued
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._live: dict[str, Request] = {}
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to serve."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End after the running pass; live requests fail with :class:`EngineStopped`."""
        self._stopping = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)
        self._give_up(EngineStopped("the engine is shutting down"))

    @property
    def healthy(self) -> bool:
        """Whether requests can be served."""
        return self._failure is None and self._thread.is_alive() and not self._stopping

    @property
    def live(self) -> int:
        """Requests that run or wait."""
        return len(self._live)

    async def generate(self, request: Request) -> Request:
        """Run ``request`` to its end. Cancelling the caller frees its row."""
        self._check()
        if request.rid in self._live:
            raise DuplicateRequest(f"Duplicate request ID detected: {request.rid}")
        if self.live - self.scheduler.rows.active >= self._max_queued:
            raise QueueFull(f"the request queue is full ({self._max_queued} waiting); try again later")
        future = asyncio.get_running_loop().create_future()
        request.context = future
        self._live[request.rid] = request
        self._send(lambda: self.scheduler.add(request))
        try:
            await future
        except asyncio.CancelledError:
            self._send(lambda: self._ended(self.scheduler.abort(lambda r: r is request, "the client went away")))
            raise
        finally:
            if self._live.get(request.rid) is request:
                del self._live[request.rid]
        return request

    async def call(self, command: Callable[[Scheduler], T]) -> T:
        """Run ``command`` in the engine's thread, between two passes."""
        self._check()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = command(self.scheduler)
            except Exception as error:  # belongs to whoever asked
                self._post(_fail, future, error)
            else:
                self._post(_resolve, future, result)

        self._send(run)
        return await future

    async def end(self, command: Callable[[Scheduler], list[Request]]) -> int:
        """Run a command that ends requests, deliver them, and say how many."""

        def run(scheduler: Scheduler) -> int:
            ended = command(scheduler)
            self._ended(ended)
            return len(ended)

        return await self.call(run)

    # -- in the loop ------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if not self.healthy:
            raise EngineStopped(f"the engine stopped: {self._failure or 'shutting down'}; restart it")

    def _send(self, job: Callable[[], None]) -> None:
        self._inbox.append(job)
        self._wake.set()

    def _deliver(self, requests: list[Request]) -> None:
        for request in requests:
            _resolve(request.context, None)

    def _give_up(self, error: EngineStopped) -> None:
        """Answer everybody who waits, once the thread takes nothing more."""
        while self._inbox:  # what came too late for the thread
            self._inbox.popleft()()
        for request in list(self._live.values()):
            _fail(request.context, error)

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                while self._inbox:
                    self._inbox.popleft()()
                if self.scheduler.idle:
                    self._wake.wait()
                else:
                    self._ended(self.scheduler.step())
        except Exception as error:  # the last thing this thread does is to tell everybody
            log.exception("the engine's thread failed")
            self._failure = error
            self._post(self._give_up, EngineStopped(f"the engine failed: {error}; restart it"))

    def _ended(self, requests: list[Request]) -> None:
        if requests:
            self._post(self._deliver, requests)

    def _post(self, function: Callable[..., object], *arguments: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
