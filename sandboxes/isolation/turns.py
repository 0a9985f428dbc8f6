"""Who is at a slot's files: many who use them, or one who puts others in their place.

For threads and for any number of event loops at once. Nobody holds a turn while a command runs, only while it is
started.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator

from envfarm.core.errors import SandboxError
from sandboxes.isolation.files.interruptible import Interrupted

_LOOK_SECONDS = 0.1
_WAIT_SECONDS = 60.0  # files of the largest slots are copied in less


class Turns:
    """Turns at the files of one slot."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._using = 0
        self._waiting = 0
        self._alone = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """A turn beside others, once nobody replaces the files. Blocking. Raises :class:`SandboxError`."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while not self._enter():
            self._look(deadline)
        try:
            yield
        finally:
            self._leave()

    @contextlib.asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """The same for an event loop, which goes on meanwhile."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while not self._enter():
            await asyncio.to_thread(self._look, deadline)
        try:
            yield
        finally:
            self._leave()

    @contextlib.contextmanager
    def alone(self, stop: threading.Event | None = None) -> Iterator[None]:
        """The only turn; who comes later waits. Blocking.

        Raises :class:`SandboxError` when others do not leave, and ``Interrupted`` once ``stop`` is set.
        """
        deadline = time.monotonic() + _WAIT_SECONDS
        with self._changed:
            self._waiting += 1
            try:
                while self._alone or self._using:
                    if stop is not None and stop.is_set():
                        raise Interrupted
                    if time.monotonic() > deadline:
                        raise SandboxError(f"the slot's files are in use for more than {_WAIT_SECONDS:.0f} s")
                    self._changed.wait(_LOOK_SECONDS)
                self._alone = True
            finally:
                self._waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()

    def _enter(self) -> bool:
        with self._changed:
            if self._alone or self._waiting:
                return False
            self._using += 1
            return True

    def _leave(self) -> None:
        with self._changed:
            self._using -= 1
            self._changed.notify_all()

    def _look(self, deadline: float) -> None:
        """Wait a while for the one who replaces the files; holds nothing, so that whoever waits may be cancelled."""
        if time.monotonic() > deadline:
            raise SandboxError(f"the slot's files are being replaced for more than {_WAIT_SECONDS:.0f} s")
        with self._changed:
            if self._alone or self._waiting:
                self._changed.wait(_LOOK_SECONDS)
