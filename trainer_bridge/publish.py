"""A new policy version: a folder on disk, then every engine, then the run registry, in this order.

Nobody is told of a version that an engine could not load, and no engine is told of a folder that is not whole.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from envfarm.core.deadline import Deadline
from envfarm.core.engine import Engine
from envfarm.core.errors import DeadlineExceeded, EngineError, Unavailable
from trainer_bridge.ports import Runs

log = logging.getLogger(__name__)
UPDATE_SECONDS = 120.0
RETRY_SECONDS = 1.0


class Publisher:
    """Puts versions out. Without an engine they go to disk only, and the registry is told nothing."""

    def __init__(self, root: Path, run_id: str, engine: Engine | None, runs: Runs, *, keep: int) -> None:
        self._root = root
        self._run_id = run_id
        self._engine = engine
        self._runs = runs
        self._keep = max(1, keep)

    def folder(self, version: int) -> Path:
        """Where the weights of ``version`` are."""
        return self._root / f"v{version:06d}"

    async def publish(self, version: int, write: Callable[[Path], Awaitable[None]]) -> Path:
        """Let ``write`` make the folder of ``version``, serve it everywhere, announce it, forget old folders."""
        folder = self.folder(version)
        await asyncio.to_thread(self._root.mkdir, parents=True, exist_ok=True)
        await write(folder)
        if self._engine is not None:
            await self.serve(folder, version)
            await self.announce(version)
        await asyncio.to_thread(self._forget)
        return folder

    async def serve(self, folder: Path, version: int) -> None:
        """Load ``folder`` as ``version`` into the engines and make sure that all of them serve it."""
        assert self._engine is not None
        deadline = Deadline.after(UPDATE_SECONDS)
        path = str(await asyncio.to_thread(folder.resolve))
        while True:
            try:
                await self._engine.update_weights_from_disk(path, version=version, timeout=deadline.remaining())
                await self._verify(version)
                return
            except EngineError as error:
                if deadline.expired():
                    raise
                log.warning("engines do not serve version %d yet: %s; trying again", version, error)
            await asyncio.sleep(min(RETRY_SECONDS, deadline.remaining()))

    async def served(self) -> set[int]:
        """Versions that healthy engines serve now; empty without engines."""
        if self._engine is None:
            return set()
        return {status.version for status in await self._engine.status() if status.healthy}

    async def announce(self, version: int) -> None:
        """Tell the run registry; a gateway that is away for a moment is waited for."""
        deadline = Deadline.after(UPDATE_SECONDS)
        while True:
            try:
                await self._runs.publish_version(self._run_id, version)
                return
            except (Unavailable, DeadlineExceeded) as error:
                if deadline.expired():
                    raise
                log.warning("version %d is not announced yet: %s; trying again", version, error)
            await asyncio.sleep(min(RETRY_SECONDS, deadline.remaining()))

    async def _verify(self, version: int) -> None:
        versions = await self.served()
        if versions != {version}:
            found = ", ".join(map(str, sorted(versions))) or "nothing"
            raise EngineError(f"expected all engines to serve version {version}, they serve {found}")

    def _forget(self) -> None:
        folders = sorted(p for p in self._root.glob("v[0-9]*") if p.is_dir())
        for old in folders[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)


def version_after_start(registered: int, restored: int) -> int:
    """The version under which a starting trainer's weights go out, given the registry's and its own.

    A registry that is ahead knows weights of a lineage that was lost, so the restored ones need a number of their own.
    One that is behind was not told of the last version before the trainer ended, and is told now.
    """
    return restored if registered <= restored else registered + 1
