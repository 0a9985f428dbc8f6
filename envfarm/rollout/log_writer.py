"""Carries finished trajectories to the log: encoded in a thread, appended in batches, nothing lost while it is away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from types import TracebackType

import msgspec

from envfarm.core.errors import CorruptRecord, LogFull, Unavailable
from envfarm.core.log import LogRecord
from envfarm.core.outcome import Outcome
from envfarm.core.trajectory import Trajectory, TrajectoryHeader
from envfarm.rollout.ports import Log
from envfarm.trajectories.codec import encode
from envfarm.wire.retry import backoff

log = logging.getLogger(__name__)
ROOM = 256
"""Trajectories that may wait; beyond, :meth:`LogWriter.put` waits, and so do episodes."""
BATCH = 32
APPEND_SECONDS = 10.0
PATIENCE_SECONDS = 300.0


class LogWriter:
    """An async context manager; leaving it waits until everything put in is durable.

    When the log is full or unreachable for ``patience_s`` seconds, the context ends with the log's error.
    """

    def __init__(self, sink: Log, *, patience_s: float = PATIENCE_SECONDS) -> None:
        self._sink = sink
        self.patience_s = patience_s
        """May be shortened at any time."""
        self._queue: asyncio.Queue[Trajectory | None] = asyncio.Queue(ROOM)
        self._tasks = asyncio.TaskGroup()
        self.trouble = ""
        """Why the log does not take anything at the moment; empty when it does."""

    async def __aenter__(self) -> LogWriter:
        await self._tasks.__aenter__()
        self._tasks.create_task(self._write(), name="log writer")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self._queue.put(None)
        await self._tasks.__aexit__(kind, error, trace)

    @property
    def waiting(self) -> int:
        """Trajectories that are not yet handed to the log."""
        return self._queue.qsize()

    async def put(self, trajectory: Trajectory) -> None:
        """Hand over one trajectory; waits while there is no room."""
        await self._queue.put(trajectory)

    async def _write(self) -> None:
        more = True
        while more:
            batch = [await self._queue.get()]
            while len(batch) < BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            more = None not in batch
            trajectories = [trajectory for trajectory in batch if trajectory is not None]
            if trajectories:
                await self._append(await asyncio.to_thread(_records, trajectories))

    async def _append(self, records: Sequence[LogRecord]) -> None:
        since = time.monotonic()
        attempt = 0
        while True:
            try:
                await self._sink.append(records, timeout=min(APPEND_SECONDS, max(self.patience_s, 0.1)))
                self.trouble = ""
                return
            except (LogFull, Unavailable) as error:
                if not self.trouble:
                    log.warning("the trajectory log takes nothing: %s", error)
                self.trouble = str(error)
                if time.monotonic() - since >= self.patience_s:
                    count = len(records) + self.waiting
                    log.error("%d trajectories were not logged: %s", count, error)  # noqa: TRY400 - it is raised too
                    raise
            await asyncio.sleep(backoff(attempt))
            attempt += 1


def _records(trajectories: Sequence[Trajectory]) -> list[LogRecord]:
    return [_record(trajectory) for trajectory in trajectories]


def _record(trajectory: Trajectory) -> LogRecord:
    try:
        return LogRecord(header=TrajectoryHeader.of(trajectory), payload=encode(trajectory))
    except CorruptRecord as error:  # too large for any record: keep what is known about it
        bare = msgspec.structs.replace(
            trajectory,
            outcome=Outcome.infra_failed(f"{error.code}: {error}"),
            final=True,
            prompt=(),
            segments=(),
            steps=(),
            reward=None,
        )
        return LogRecord(header=TrajectoryHeader.of(bare), payload=encode(bare))
