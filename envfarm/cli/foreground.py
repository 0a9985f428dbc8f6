"""Runs the work of a command that a person waits for: Ctrl-C and SIGTERM end it in order, at any moment and once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Result of ``work``. The first SIGINT or SIGTERM cancels it; more change nothing, for its end is bounded.

    Raises :class:`SystemExit` with the shell's status for that signal (130, 143) once everything has been cleared
    away, whatever was raised meanwhile. A signal that this process was started to ignore stays ignored.
    """
    told: list[signal.Signals] = []
    try:
        return asyncio.run(_until_told(work, told))
    except (Exception, asyncio.CancelledError, BaseExceptionGroup):
        if not told:
            raise
        raise SystemExit(128 + told[0]) from None


async def _until_told(work: Coroutine[Any, Any, T], told: list[signal.Signals]) -> T:
    task = asyncio.current_task()

    def tell(number: signal.Signals) -> None:
        if not told and task is not None:
            task.cancel()
        told.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, tell, number)
    return await work
