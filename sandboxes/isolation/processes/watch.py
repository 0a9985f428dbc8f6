"""Looks, as long as processes go on between calls, whether they take more than their share.

For bounds that the kernel does not keep here. A thread and no task, since processes belong to no event loop: it looks
whether or not somebody reads from them. There is one for a slot, while any of them runs, and none otherwise.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger("sandboxes.isolation")
_PAUSE_SECONDS = 0.1
_PAUSE_FACTOR = 4  # at least this many times what a look takes
_END_SECONDS = 10.0


class Watched(Protocol):
    """A process, to be asked and killed from any thread."""

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        ...

    def kill(self) -> None:
        """Kill it, without waiting."""
        ...


class Watch:
    """Watches the processes of one slot."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._excess: dict[Watched, Callable[[], bool]] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def add(self, process: Watched, excess: Callable[[], bool]) -> None:
        """Kill ``process`` once ``excess`` is so; it is asked in the thread and may block a while."""
        with self._lock:
            self._excess[process] = excess
            if self._thread is None:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._look, args=(self._stop,), name="watch of a slot", daemon=True
                )
                self._thread.start()

    def end(self) -> None:
        """Look no longer. Blocking until the last look is over."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._excess.clear()
            self._stop.set()
        if thread is not None:
            thread.join(_END_SECONDS)

    def _look(self, stop: threading.Event) -> None:
        pause = _PAUSE_SECONDS
        while not stop.wait(pause):
            with self._lock:
                if stop.is_set():
                    return
                for process in [each for each in self._excess if not each.running]:
                    del self._excess[process]
                if not self._excess:
                    self._thread = None
                    return
                looked_at = list(self._excess.items())
            started = time.monotonic()
            for process, excess in looked_at:
                if _exceeded(excess):
                    process.kill()  # it is not running at the next look
            pause = max(_PAUSE_SECONDS, _PAUSE_FACTOR * (time.monotonic() - started))


def _exceeded(excess: Callable[[], bool]) -> bool:
    try:
        return excess()
    except Exception:
        log.warning("it cannot be seen what a kept process takes; it is killed", exc_info=True)
        return True
