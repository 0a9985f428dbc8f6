"""Our end of a pipe to a process: read and written without blocking, on whatever loop asks, closed from any thread.

Nothing is read ahead: what nobody asks for stays in the kernel's pipe, and whoever fills that waits.
"""

from __future__ import annotations

import asyncio
import os
import threading

_DISCARDED_AT_ONCE = 16  # reads
_CHUNK = 1 << 16


class PipeEnd:
    """Owns ``fd``. One task at a time may wait on it."""

    def __init__(self, fd: int, *, writing: bool = False) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._writing = writing
        self._lock = threading.Lock()  # whoever closes must not do so between a look at the number and its use
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._closing = False

    @property
    def closed(self) -> bool:
        """Whether it was closed, by us or at its end."""
        return self._fd < 0 or self._closing

    async def read(self, limit: int) -> bytes:
        """What is there, at most ``limit`` bytes, after waiting for something to be; empty at the end."""
        while (data := self.read_now(limit)) is None:
            await self._ready()
        return data

    def read_now(self, limit: int) -> bytes | None:
        """What is there, ``None`` when nothing is, empty at the end."""
        with self._lock:
            if self.closed:
                return b""
            try:
                data = os.read(self._fd, limit)
            except BlockingIOError:
                return None
            if not data:
                self._close()
            return data

    def discard(self) -> bool:
        """Throw away what is there; whether more may come."""
        for _ in range(_DISCARDED_AT_ONCE):
            data = self.read_now(_CHUNK)
            if data is None:
                return True
            if not data:
                return False
        return True

    async def write(self, data: bytes) -> None:
        """Write all of ``data``. Raises :class:`BrokenPipeError` when nobody reads."""
        rest = memoryview(data)
        while rest:
            with self._lock:
                if self.closed:
                    raise BrokenPipeError
                try:
                    rest = rest[os.write(self._fd, rest) :]
                    continue
                except BlockingIOError:
                    pass
            await self._ready()

    async def _ready(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        with self._lock:
            if self.closed:
                return
            if self._waiter is not None and not self._waiter[0].is_closed():
                raise RuntimeError("two tasks wait for one end of a pipe")
            (loop.add_writer if self._writing else loop.add_reader)(self._fd, ready.set)
            self._waiter = loop, ready
        try:
            await ready.wait()
        finally:
            with self._lock:
                self._waiter = None
                if self._fd >= 0:
                    (loop.remove_writer if self._writing else loop.remove_reader)(self._fd)
                if self._closing:
                    self._close()

    def close(self) -> None:
        """Close it. Who waits for it wakes up."""
        with self._lock:
            if self.closed:
                return
            if self._waiter is not None:
                loop, ready = self._waiter
                try:
                    loop.call_soon_threadsafe(ready.set)
                except RuntimeError:  # a loop that is no more: nobody wakes up on it
                    self._close()
                else:
                    self._closing = True
                return
            self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
