"""Back-pressure in bytes: whoever wants to queue data first waits for room, first come first served."""

from __future__ import annotations

import asyncio
from collections import deque

from envfarm.core.errors import Unavailable


class ByteBudget:
    """At most ``limit`` bytes are taken at once; one request larger than that is let in alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int, *, timeout: float) -> None:
        """Wait for room and take it. Raises ``Unavailable`` after ``timeout`` seconds; then nothing is taken."""
        if not self._waiting and self._fits(size):
            self.taken += size
            return
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, room))
        try:
            async with asyncio.timeout(timeout):
                await room
        except TimeoutError:
            self._forget(size, room)
            raise Unavailable(f"no room for {size} bytes within {timeout:g} s: {self.taken} are waiting") from None
        except asyncio.CancelledError:
            self._forget(size, room)
            raise

    def give(self, size: int) -> None:
        """Give room back."""
        self.taken -= size
        self._admit()

    def _fits(self, size: int) -> bool:
        return self.taken == 0 or self.taken + size <= self.limit

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, room = self._waiting.popleft()
            if not room.done():
                self.taken += size
                room.set_result(None)

    def _forget(self, size: int, room: asyncio.Future[None]) -> None:
        """Undo a wait that was given up, whether or not its room had come in the same moment."""
        if room.done() and not room.cancelled():
            self.give(size)
        else:
            self._waiting = deque(entry for entry in self._waiting if entry[1] is not room)
            self._admit()
