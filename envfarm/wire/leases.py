"""What a client wants to keep: handles of its open episodes, renewed while it lives, however long its policy thinks.

A slot whose client was killed is freed when the episode's lease ends, long before its time limit. Leases are kept on
the host's clock and stand still while no gateway is in contact with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Sequence

from envfarm.core.errors import FarmError

LEASE_SECONDS = 40.0  # with what frees the slot less than the minute in which nothing of a dead client may be left
AT_ONCE = 512
_TOUCHES_A_LEASE = 4

Touch = Callable[[Sequence[str], float], Awaitable[Sequence[str]]]


class Leases:
    """Handles to renew; an async context manager.

    ``touch(handles, timeout)`` tells the gateway and returns the handles of episodes that are gone.
    """

    def __init__(self, touch: Touch, seconds: float) -> None:
        self._touch = touch
        self._pause = seconds / _TOUCHES_A_LEASE
        self._wanted: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self.want = self._wanted.add
        """Renew this handle from now on."""
        self.forget = self._wanted.discard
        """Renew this handle no more."""

    async def __aenter__(self) -> Leases:
        self._task = asyncio.create_task(self._renew(), name="leases of episodes")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._pause)
            waiting = iter(tuple(self._wanted))
            while handles := list(itertools.islice(waiting, AT_ONCE)):
                with contextlib.suppress(FarmError):  # the gateway is away: the next time may be better
                    self._wanted.difference_update(await self._touch(handles, self._pause))
