"""The run's state as the trainer knows it, and whether there is a reason to stop."""

from __future__ import annotations

import asyncio
import logging

from envfarm.core.errors import DeadlineExceeded, Unavailable
from envfarm.core.run import Run, RunState
from trainer_bridge.ports import Runs

log = logging.getLogger(__name__)
POLL_SECONDS = 0.5  # how late a pause, a stop or a signal may be seen


class RunWatch:
    """Follows one run. A registry that is away leaves the last known state standing."""

    def __init__(self, runs: Runs, run: Run) -> None:
        self._runs = runs
        self._stopping = asyncio.Event()
        self.run = run
        self.cause = ""  # why training stops, once it does

    @property
    def paused(self) -> bool:
        """Whether nothing may be trained now."""
        return self.run.state is RunState.PAUSED

    @property
    def stopping(self) -> bool:
        """Whether there is a reason to stop."""
        if self.run.state is RunState.STOPPED:
            self.stop(f"the run was stopped ({self.run.cause or 'no cause given'})")
        return self._stopping.is_set()

    def stop(self, cause: str) -> None:
        """Give a reason to stop; the first one counts."""
        if not self._stopping.is_set():
            self.cause = cause
            self._stopping.set()

    async def follow(self) -> None:
        """Keep the state fresh, until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                self.run = await self._runs.get(self.run.id)
            except (Unavailable, DeadlineExceeded) as error:
                log.warning("the run's state is not known: %s", error)

    async def wait_stopping(self, seconds: float | None) -> None:
        """Return when there is a reason to stop, after ``seconds`` at the latest (``None``: wait for ever)."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return
