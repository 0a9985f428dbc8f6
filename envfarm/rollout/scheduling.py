"""Which episodes are in flight, how many may run at once, and what they wait for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator

from envfarm.core.errors import ConfigError
from envfarm.core.trajectory import Trajectory
from envfarm.rollout.episode import Episode, Phase


class InFlight:
    """At most ``concurrency`` episodes run; those beyond wait for a place. One for all groups of a process."""

    def __init__(self, concurrency: int) -> None:
        if concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {concurrency}")
        self.concurrency = concurrency
        self._places = asyncio.Semaphore(concurrency)
        self._episodes: set[Episode] = set()
        self._aborted_by: str | None = None

    async def run(self, episode: Episode) -> Trajectory:
        """Run ``episode`` in a place. After :meth:`abort_all` it ends at once, as aborted."""
        with self._tracked(episode):
            if self._aborted_by is not None:
                episode.abort(self._aborted_by)
            return await episode.run(self._places)

    def abort_all(self, by: str) -> None:
        """Abort every episode, and every one that comes later."""
        self._aborted_by = by
        for episode in tuple(self._episodes):
            episode.abort(by)

    @property
    def open(self) -> int:
        """Episodes that have a place."""
        return sum(episode.phase is not Phase.PLACE for episode in self._episodes)

    def waiting_for(self) -> dict[str, int]:
        """What episodes wait for, most frequent first."""
        return dict(Counter(episode.phase.value for episode in self._episodes).most_common())

    def longest(self) -> tuple[str, str, float] | None:
        """Id, wait and seconds of the episode that has waited longest for the same thing."""
        if not self._episodes:
            return None
        episode = min(self._episodes, key=lambda e: e.since)
        return episode.spec.id, episode.phase.value, time.monotonic() - episode.since

    @contextlib.contextmanager
    def _tracked(self, episode: Episode) -> Iterator[None]:
        self._episodes.add(episode)
        try:
            yield
        finally:
            self._episodes.discard(episode)
