"""When groups become a batch, and which of them: window, staleness bound, zero variance. Pure.

A version is made of a *window* of whole groups, as many as the run's ``groups_per_version``, less those that cannot
teach. When too few of a window can (``fill``), no version is made of it: those few are carried into the next window,
since an update from a handful of episodes is mostly noise, and AdamW takes as large a step from it as from a whole
batch (dynamic sampling, Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.2). The window's position is done with
either way, so that leave to start further groups is given.
"""

from __future__ import annotations

import math
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
    train, but the window is done with, and ``carried`` of its groups wait for the next one.
    """

    position: int
    judged: tuple[Judged, ...]
    drops: Drops
    reward: float | None
    staleness: tuple[int, ...]
    carried: int = 0


class BatchFormer:
    """Collects groups until a window is full, then judges it at the trainer's version of that moment.

    ``data`` is complete (:meth:`DataSettings.for_run`); its ``staleness`` of ``None`` means no bound.
    """

    def __init__(self, data: DataSettings, advantage: AdvantageSettings) -> None:
        self._data = data
        self._size = data.groups_per_version or 1
        self._advantage = advantage
        self._window: list[TrainingGroup] = []
        self._carried: list[TrainingGroup] = []
        self._least = 0 if advantage.kind == "batch" else math.ceil(data.fill * self._size)

    @property
    def size(self) -> int:
        """Groups of a whole window."""
        return self._size

    @property
    def waiting(self) -> int:
        """Groups collected so far."""
        return len(self._window)

    @property
    def carried(self) -> int:
        """Trajectories of earlier windows that wait for company."""
        return sum(len(g.members) for g in self._carried)

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
        window, self._window = [*self._carried, *self._window], []
        fresh = [g for g in window if self._fresh(g, version)]
        least = 1 if self._data.singles else 2
        kept = [g for g in fresh if len(g.members) >= least]
        judged = self._judged(kept, generator)
        self._carried = self._too_few(kept, judged)
        found = () if self._carried else tuple(judged)
        return Batch(
            position=max((g.position for g in window), default=0),
            judged=found,
            drops=Drops(
                stale=sum(len(g.members) for g in window) - sum(len(g.members) for g in fresh),
                zero_variance=sum(len(g.members) for g in kept) - self.carried - len(found),
                lone=sum(len(g.members) for g in fresh) - sum(len(g.members) for g in kept),
                no_reward=sum(len(g.left_out) for g in window),
            ),
            reward=_mean_return(fresh),
            staleness=tuple(version - (j.trajectory.oldest_version or 0) for j in found),
            carried=len(self._carried),
        )

    def _too_few(self, kept: Sequence[TrainingGroup], judged: Sequence[Judged]) -> list[TrainingGroup]:
        """The groups that teach, when there are too few of them to make a version; else none."""
        teaching = {j.trajectory.group_id for j in judged}
        return [g for g in kept if g.group_id in teaching] if len(teaching) < self._least else []

    def _fresh(self, group: TrainingGroup, version: int) -> bool:
        oldest = group.oldest_version
        return self._data.staleness is None or oldest is None or version - oldest <= self._data.staleness

    def _judged(self, groups: Sequence[TrainingGroup], generator: np.random.Generator) -> list[Judged]:
        """Every member with its advantages, less those that were exactly as good as their peers at every step."""
        members = [[*g.members] for g in groups]
        if self._advantage.kind == "batch":
            members = [[t for group in members for t in group]]
        rewards: list[list[Rewards]] = [[step_rewards(t) for t in group] for group in members]
        if self._data.shuffle_rewards:
            rewards = shuffled(rewards, generator)
        judged: list[Judged] = []
        for group, group_rewards in zip(members, rewards, strict=True):
            settings = self._advantage
            found = estimate(settings.kind, group_rewards, gamma=settings.gamma, lam=settings.lam, std=settings.std)
            aligned = [fitted(a, len(t.steps)) for t, a in zip(group, found, strict=True)]
            judged += [
                Judged(trajectory=trajectory, advantages=advantages)
                for trajectory, advantages in zip(group, aligned, strict=True)
                if _informative(advantages) or not self._data.drop_zero_variance
            ]
        return judged


def step_rewards(trajectory: Trajectory) -> list[float | None]:
    """The step rewards of a trajectory, in order; ``None`` where nothing was measured."""
    return [step.reward for step in trajectory.steps]


def shuffled(rewards: Sequence[Sequence[Rewards]], generator: np.random.Generator) -> list[list[Rewards]]:
    """The reward lists of whole episodes, dealt out at random among the episodes of each group.

    The negative control: every group keeps its rewards, its baseline and whether it teaches at all; only which episode
    earned what is lost. So the updates are as large and as many as in the real run, and success must not rise.
    """
    return [[group[i] for i in generator.permutation(len(group))] for group in rewards]


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
