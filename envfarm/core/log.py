"""The trajectory log: append, durable, acknowledged; consumers read whole groups in order and commit.

At-least-once: a consumer that dies before it commits sees the same groups again, and tells them apart by id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from envfarm.core.trajectory import Purpose, TrajectoryHeader


class LogRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A header, and the encoded trajectory as opaque bytes."""

    header: TrajectoryHeader
    payload: bytes


class Appended(msgspec.Struct, frozen=True, kw_only=True):
    """Acknowledgement of one record: it is on disk. ``duplicate``: its id was there already, nothing was added."""

    id: str
    duplicate: bool


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """All final records of one group. ``position`` numbers whole groups of a run from 1, as they became whole."""

    position: int
    group_id: str
    records: tuple[LogRecord, ...]


class LogCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one run."""

    records: int
    trainable: int
    infra_failed: int
    groups: int
    bytes: int


class TrajectoryLog(Protocol):
    """One store of trajectories. Implemented by ``envfarm.trajectories``."""

    async def append(self, records: Sequence[LogRecord]) -> Sequence[Appended]:
        """Returns when every record is durable. Raises ``LogFull`` or ``LogError``: then nothing is acknowledged."""
        ...

    async def groups(self, run_id: str, *, purpose: Purpose, after: int, limit: int, timeout: float) -> Sequence[Group]:
        """Whole groups at positions greater than ``after``, in order; waits up to ``timeout`` seconds for the first."""
        ...

    async def commit(self, run_id: str, consumer: str, position: int) -> None:
        """Note that ``consumer`` is done with everything up to ``position``. Never moves back."""
        ...

    async def committed(self, run_id: str, consumer: str) -> int:
        """Last committed position, 0 when there is none."""
        ...

    async def counts(self, run_id: str) -> LogCounts:
        """Totals of one run."""
        ...

    async def close(self) -> None:
        """Flush and close."""
        ...
