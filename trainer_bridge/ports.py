"""What a trainer asks of the gateway. ``envfarm.wire`` has the clients that offer it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from envfarm.core.log import Group
from envfarm.core.run import MetricPoint, Run
from envfarm.core.trajectory import Purpose


class GroupLog(Protocol):
    """Gives whole groups and keeps the trainer's place: :class:`envfarm.wire.log_client.LogClient`."""

    def subscribe(
        self, run_id: str, consumer: str, *, purpose: Purpose = "train", after: int | None = None
    ) -> AsyncIterator[Group]:
        """Whole groups in order, for ever."""
        ...

    async def commit(self, run_id: str, consumer: str, position: int) -> None:
        """Done up to ``position``."""
        ...


class Runs(Protocol):
    """Knows the run, its versions and its metrics: :class:`envfarm.wire.run_client.RunClient`."""

    async def get(self, run_id: str) -> Run:
        """The run as it is now."""
        ...

    async def publish_version(self, run_id: str, version: int) -> None:
        """Tell that ``version`` is out."""
        ...

    async def report(self, run_id: str, points: Sequence[MetricPoint]) -> None:
        """Add points to their series."""
        ...
