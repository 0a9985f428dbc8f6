"""Long work on files, off the event loop and with an end: whoever stops waiting stops the work."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
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
