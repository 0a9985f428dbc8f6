"""What rank 0 tells the other ranks to do, and the loop in which they do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trainer_bridge.learner import Learner, UpdateMetrics, UpdateShard
from trainer_bridge.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Save:
    """Write shards to ``folder``."""

    folder: Path


@dataclass(frozen=True, slots=True)
class Load:
    """Read shards from ``folder``."""

    folder: Path


@dataclass(frozen=True, slots=True)
class Gather:
    """Gather the full weights on rank 0."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing: rank 0 is alive and waits for data."""


@dataclass(frozen=True, slots=True)
class End:
    """Leave the loop."""


Order = UpdateShard | Save | Load | Gather | Idle | End


def follow(learner: Learner, ranks: Ranks) -> None:
    """The life of every rank but the first: take an order, carry it out with the others, until the end."""
    while True:
        order: Order = ranks.scatter(None)
        if isinstance(order, End):
            return
        _carry_out(learner, order)


def _carry_out(learner: Learner, order: Order) -> None:
    match order:
        case UpdateShard():
            learner.update(order)
        case Save():
            learner.save(order.folder)
        case Load():
            learner.load(order.folder)
        case Gather():
            learner.weights()


class Learners:
    """All ranks' learners, as rank 0 sees them. Blocking; call from one thread only."""

    def __init__(self, learner: Learner, ranks: Ranks) -> None:
        self._learner = learner
        self._ranks = ranks

    @property
    def learner(self) -> Learner:
        """Rank 0's own."""
        return self._learner

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self._ranks.world

    def update(self, shards: Sequence[UpdateShard]) -> UpdateMetrics:
        """One update; ``shards`` has one entry per rank."""
        self._ranks.scatter(list[Order](shards))
        return self._learner.update(shards[0])

    def save(self, folder: Path) -> None:
        """Write model and optimiser."""
        self._all(Save(folder))
        self._learner.save(folder)

    def load(self, folder: Path) -> None:
        """Restore model and optimiser."""
        self._all(Load(folder))
        self._learner.load(folder)

    def weights(self) -> dict[str, Tensor]:
        """Full weights on the CPU."""
        self._all(Gather())
        return self._learner.weights()

    def idle(self) -> None:
        """Tell the others that rank 0 lives, so that their wait does not run out."""
        self._all(Idle())

    def end(self) -> None:
        """Let the others leave their loop."""
        self._all(End())

    def _all(self, order: Order) -> None:
        self._ranks.scatter([order] * self._ranks.world)
