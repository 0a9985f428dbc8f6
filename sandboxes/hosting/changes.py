"""News of hosts for whoever watches a backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from envfarm.core.sandbox import Host

_WATCH_QUEUE = 1024


class Changes:
    """Every change of a host's state, told to each watcher. A watcher that does not read sees the latest, not all."""

    def __init__(self) -> None:
        self._watchers: set[asyncio.Queue[Host]] = set()

    def tell(self, host: Host) -> None:
        """``host`` has changed."""
        for queue in self._watchers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(host)

    async def watch(self) -> AsyncIterator[Host]:
        """Changes from now on."""
        queue: asyncio.Queue[Host] = asyncio.Queue(_WATCH_QUEUE)
        self._watchers.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._watchers.discard(queue)
