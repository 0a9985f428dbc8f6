"""Long work on files, off the event loop and with an end: whoever stops waiting stops the work."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class Interrupted(Exception):
    """Raised by work that was stopped: nobody waits for it any more."""


async def interruptible(work: Callable[[threading.Event], T]) -> T:
    """Run ``work`` in a thread. Cancelled, it sets the event and waits until ``work`` has cleared up and returned."""
    stop = threading.Event()
    thread = asyncio.ensure_future(asyncio.to_thread(work, stop))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        stop.set()
        while not thread.done():
            with contextlib.suppress(BaseException):  # cancelled again, or what came of the work: nobody asks
                await asyncio.shield(thread)
        raise


async def to_the_end(work: Awaitable[T]) -> T:
    """Await ``work`` whole, however often one is cancelled meanwhile; that is raised afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    with contextlib.suppress(BaseException):  # what came of it: nobody asks
        task.result()
    raise cancelled
