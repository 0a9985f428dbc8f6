"""The event loop on which async environment code runs, in a thread of its own.

Such code may forget that it must not block. Here it holds up only other async environment code: the host's own loop
goes on, sees that this one does not answer, interrupts it and, if that does not help, puts a new one in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Awaitable
from typing import Any

CLOSE_SECONDS = 2.0


class Interrupt(BaseException):  # not an Exception: environment code must not catch it by accident
    """Raised from outside in the middle of an overdue call."""


def raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Have ``error`` raised in ``thread`` at its next bytecode; ``None`` takes a pending one back."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error) if error else None)


class Call:
    """One awaitable on the code loop. ``ended`` (of the host's loop) gets its value and its error."""

    def __init__(self, home: asyncio.AbstractEventLoop) -> None:
        self._home = home
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False
        self.ended: asyncio.Future[tuple[Any, BaseException | None]] = home.create_future()

    def begin(self, awaitable: Awaitable[Any]) -> None:
        """On the code loop."""
        self._task = asyncio.get_running_loop().create_task(_run(awaitable))
        self._task.add_done_callback(self._end)
        if self._cancelled:
            self._task.cancel()

    def cancel(self) -> None:
        """On the code loop."""
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    def _end(self, task: asyncio.Task[Any]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        outcome = (None, error) if error is not None else (task.result(), None)
        with contextlib.suppress(RuntimeError):  # the host's loop is closed: nobody waits for this any more
            self._home.call_soon_threadsafe(self._settle, outcome)

    def _settle(self, outcome: tuple[Any, BaseException | None]) -> None:
        if not self.ended.done():
            self.ended.set_result(outcome)


class CodeLoop:
    """One loop and its thread. Every method is called on the host's loop."""

    def __init__(self) -> None:
        self._home = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="environment coroutines", daemon=True)
        self._thread.start()

    def start(self, awaitable: Awaitable[Any]) -> Call:
        """Run ``awaitable``."""
        call = Call(self._home)
        self._loop.call_soon_threadsafe(call.begin, awaitable)
        return call

    def cancel(self, call: Call) -> None:
        """Ask a call to end."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call.cancel)

    async def answers(self, seconds: float) -> bool:
        """Whether the loop turns."""
        pong = asyncio.Event()
        self._loop.call_soon_threadsafe(self._home.call_soon_threadsafe, pong.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await pong.wait()
        return pong.is_set()

    def interrupt(self) -> None:
        """Break whatever holds the loop up, if it is Python code."""
        raise_in(self._thread.ident or 0, Interrupt)

    async def close(self) -> None:
        """Cancel what runs and end the thread; one that hangs is a daemon and does not hold the exit."""
        self._closing = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._closing:
            with contextlib.suppress(Interrupt):
                self._loop.run_forever()
        with contextlib.suppress(Interrupt):
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSE_SECONDS))
            self._loop.close()


async def _run(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
