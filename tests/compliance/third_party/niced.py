"""A backend as somebody else may write it: hosts of the local backend, run at a low priority."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import psutil

from envfarm.core.sandbox import Host, SandboxProfile
from sandboxes.local.backend import LocalBackend


class NicedBackend:
    """Makes hosts that yield the processors to everybody else. ``nice``: 1 to 19."""

    def __init__(
        self, state_dir: Path, *, environments: Sequence[str], slots: int, max_hosts: int = 1, nice: int = 10
    ) -> None:
        self._nice = nice
        self._folder = str(state_dir)
        self._inner = LocalBackend(state_dir, environments=environments, slots=slots, max_hosts=max_hosts)

    async def acquire(self, profile: SandboxProfile) -> Host:
        return self._niced(await self._inner.acquire(profile))

    async def release(self, host_id: str) -> None:
        await self._inner.release(host_id)

    async def recycle(self, host_id: str, cause: str) -> Host:
        return self._niced(await self._inner.recycle(host_id, cause))

    async def list(self) -> Sequence[Host]:
        return await self._inner.list()

    def watch(self) -> AsyncIterator[Host]:
        return self._inner.watch()

    async def close(self, *, keep_hosts: bool = False) -> None:
        await self._inner.close(keep_hosts=keep_hosts)

    def _niced(self, host: Host) -> Host:
        for process in psutil.process_iter(["cmdline"]):
            if host.id in (process.info["cmdline"] or ()):
                process.nice(self._nice)
        return host
