"""When groups become a batch, and which of them: window, staleness bound, zero variance. Pure.

A version is made of a *window* of whole groups, as many as the run's ``groups_per_version``, less those that cannot
teach. A dropped group is not replaced: leave to start groups is given out per version, so a trainer that waited for
replacements could wait for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from envfarm.core.trajectory import Trajectory
from trainer_bridge.advantages import Array, Rewards, estimate
from trainer_bridge.settings import AdvantageSettings, DataSettings
from trainer_bridge.stream import TrainingGroup

_NOISE = 1e-8  # advantages below this are rounding


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory with one advantage per step (NaN: not trained)."""

    trajectory: Trajectory
    advantages: Array


class Drops(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories of a window that are not trained on, by reason."""

    stale: int = 0
    zero_variance: int = 0
    lone: int = 0
    no_reward: int = 0

    @property
    def counted(self) -> int:
        """What ``train/dropped`` counts: trajectories that had a reward and were sampled for nothing."""
        return self.stale + self.zero_variance + self.lone


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What one version is trained on. ``position``: last group of the window; ``reward``: mean return of the fresh.

    ``staleness``: one value per trained trajectory, in versions. ``judged`` may be empty: then there is nothing to
    train, but the window is done with.
    """

    position: int
    judged: tuple[Judged, ...]
    drops: Drops
    reward: float | None
    staleness: tuple[int, ...]


class BatchFormer:
    """Collects groups until a window is full, then judges it at the trainer's version of that moment.

    ``data`` is complete (:meth:`DataSettings.for_run`); its ``staleness`` of ``None`` means no bound.
    """

    def __init__(self, data: DataSettings, advantage: AdvantageSettings) -> None:
        self._data = data
        self._size = data.groups_per_version or 1
        self._advantage = advantage
        self._window: list[TrainingGroup] = []

    @property
    def size(self) -> int:
        """Groups of a whole window."""
        return self._size

    @property
    def waiting(self) -> int:
        """Groups collected so far."""
        return len(self._window)

    @property
    def full(self) -> bool:
        """Whether :meth:`form` would give a whole window."""
        return len(self._window) >= self._size

    def add(self, group: TrainingGroup) -> None:
        """Collect one group."""
        self._window.append(group)

    def form(self, version: int, generator: np.random.Generator) -> Batch:
        """Turn the window into a batch for the trainer at ``version``; the next window starts empty.

        Every trajectory in the batch has ``version - oldest_version <= staleness``: the bound is checked here, when
        the batch is formed, not when a group arrived.
        """
        window, self._window = self._window, []
        fresh = [g for g in window if self._fresh(g, version)]
        least = 1 if self._data.singles else 2
        kept = [g for g in fresh if len(g.members) >= least]
        judged, zero_variance = self._judged(kept, generator)
        return Batch(
            position=max((g.position for g in window), default=0),
            judged=tuple(judged),
            drops=Drops(
                stale=sum(len(g.members) for g in window) - sum(len(g.members) for g in fresh),
                zero_variance=zero_variance,
                lone=sum(len(g.members) for g in fresh) - sum(len(g.members) for g in kept),
                no_reward=sum(len(g.left_out) for g in window),
            ),
            reward=_mean_return(fresh),
            staleness=tuple(version - (j.trajectory.oldest_version or 0) for j in judged),
        )

    def _fresh(self, group: TrainingGroup, version: int) -> bool:
        oldest = group.oldest_version
        return self._data.staleness is None or oldest is None or version - oldest <= self._data.staleness

    def _judged(self, groups: Sequence[TrainingGroup], generator: np.random.Generator) -> tuple[list[Judged], int]:
        members = [[*g.members] for g in groups]
        if self._advantage.kind == "batch":
            members = [[t for group in members for t in group]]
        rewards: list[list[Rewards]] = [[step_rewards(t) for t in group] for group in members]
        if self._data.shuffle_rewards:
            rewards = shuffled(rewards, generator)
        judged: list[Judged] = []
        zero_variance = 0
        for group, group_rewards in zip(members, rewards, strict=True):
            settings = self._advantage
            found = estimate(settings.kind, group_rewards, gamma=settings.gamma, lam=settings.lam, std=settings.std)
            aligned = [fitted(a, len(t.steps)) for t, a in zip(group, found, strict=True)]
            for trajectory, advantages in zip(group, aligned, strict=True):
                if self._data.drop_zero_variance and not _informative(advantages):
                    zero_variance += 1  # exactly as good as its group at every step: nothing to compute
                else:
                    judged.append(Judged(trajectory=trajectory, advantages=advantages))
        return judged, zero_variance


def step_rewards(trajectory: Trajectory) -> list[float | None]:
    """The step rewards of a trajectory, in order; ``None`` where nothing was measured."""
    return [step.reward for step in trajectory.steps]


def shuffled(rewards: Sequence[Sequence[Rewards]], generator: np.random.Generator) -> list[list[Rewards]]:
    """The reward lists of whole episodes, dealt out at random among all episodes of the batch.

    The negative control: rewards keep their distribution and lose their meaning, so success must not rise.
    """
    flat = [episode for group in rewards for episode in group]
    order = iter(generator.permutation(len(flat)))
    return [[flat[next(order)] for _ in group] for group in rewards]


def fitted(advantages: Array, steps: int) -> Array:
    """Advantages cut or extended by their last value to ``steps`` entries (needed after :func:`shuffled` only)."""
    if len(advantages) >= steps:
        return advantages[:steps]
    fill = advantages[-1] if len(advantages) else np.nan
    return np.concatenate([advantages, np.full(steps - len(advantages), fill)])


def _informative(advantages: Array) -> bool:
    return bool(np.any(np.abs(np.nan_to_num(advantages)) > _NOISE))


def _mean_return(groups: Sequence[TrainingGroup]) -> float | None:
    returns = [sum(r for r in step_rewards(member) if r is not None) for group in groups for member in group.members]
    return float(np.mean(returns)) if returns else None
