"""What the trainer tells: metric points to the run registry, one line per version to a file, one line to the log."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import msgspec

from envfarm.core.errors import DeadlineExceeded, WireError
from envfarm.core.run import MetricPoint
from trainer_bridge.ports import Runs

log = logging.getLogger(__name__)
SOURCE = "trainer"
REPORT_SECONDS = 10.0


class Reporter:
    """Reports to the registry and appends to ``file``. A registry that is away costs a warning, never the training."""

    def __init__(self, runs: Runs, run_id: str, file: Path) -> None:
        self._runs = runs
        self._run_id = run_id
        self._file = file

    async def report(self, step: int, values: dict[str, float | None]) -> None:
        """Report the values of ``step``; those that are ``None`` were not measured and are left out."""
        measured = {name: value for name, value in values.items() if value is not None}
        await asyncio.to_thread(self._append, step, measured)
        await self.points(step, measured)

    async def points(self, step: int, values: dict[str, float]) -> None:
        """Report to the registry only."""
        now = time.time()
        points = [MetricPoint(name=n, step=step, value=v, at=now, source=SOURCE) for n, v in values.items()]
        try:
            async with asyncio.timeout(REPORT_SECONDS):
                await self._runs.report(self._run_id, points)
        except (WireError, DeadlineExceeded, TimeoutError) as error:
            log.warning("metrics of step %d are not reported: %s", step, error or "no answer in time")

    def _append(self, step: int, values: dict[str, float]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode({"step": step, **values}) + b"\n")
