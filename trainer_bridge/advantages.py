"""How much better than its peers each step was: group-relative and turn-level advantages. Pure numpy.

An episode is the sequence of its step rewards, ``float | None`` per step. ``None`` is *not measured*: such a step
adds nothing to a sum, and when nothing at all was measured from a step on, that step has no return. It is then left
out of every mean and gets the advantage NaN, which the batch builder turns into "not trained on", never into 0.

All estimators take the episodes of one group (same task, same seed) and give one advantage per step and episode.
Episode-level estimators give every step of an episode the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from envfarm.core.errors import ConfigError

Array = NDArray[np.float64]
Rewards = Sequence[float | None]
Advantage = Literal["turn", "grpo", "drgrpo", "rloo", "gae", "batch"]
EPSILON = 1e-4  # keeps the quotient finite when a group agrees


def episode_return(rewards: Rewards) -> float:
    """Undiscounted sum of the measured step rewards; NaN when none was measured."""
    measured = [r for r in rewards if r is not None]
    return float(np.sum(measured)) if measured else float("nan")


def reward_to_go(rewards: Rewards, gamma: float = 1.0) -> Array:
    """Discounted sum of the measured rewards from each step on, shape [steps].

    ``G_k = sum_{l>=k} gamma^(l-k) r_l`` (Sutton and Barto 2018, eq. 3.8). NaN where nothing was measured from k on.
    """
    out = np.full(len(rewards), np.nan)
    ahead = float("nan")
    for k in range(len(rewards) - 1, -1, -1):
        r = rewards[k]
        if r is not None:
            ahead = r + (0.0 if np.isnan(ahead) else gamma * ahead)
        elif not np.isnan(ahead):
            ahead = gamma * ahead
        out[k] = ahead
    return out


def grpo(returns: Array, *, std: bool = True) -> Array:
    """``A_i = (R_i - mean(R)) / (std(R) + eps)`` over one group; shape [members].

    Shao et al. 2024 (DeepSeekMath, arXiv 2402.03300), section 4.1.2. The standard deviation is the sample's (n - 1).
    Dividing by it weighs easy and hard tasks alike, which biases the gradient; ``std=False`` leaves it out.
    """
    centred: Array = returns - _mean(returns)
    return centred / (_std(returns) + EPSILON) if std else centred


def dr_grpo(returns: Array) -> Array:
    """``A_i = R_i - mean(R)``; shape [members].

    Liu et al. 2025 (Understanding R1-Zero-Like Training, arXiv 2503.20783), section 3.2: no division by the group's
    standard deviation. Its other half, no division by each answer's length, is the loss's token-level normalisation.
    """
    return grpo(returns, std=False)


def rloo(returns: Array) -> Array:
    """``A_i = R_i - mean_{j != i}(R_j)``; shape [members]. NaN when there is no other member.

    Ahmadian et al. 2024 (Back to Basics, arXiv 2402.14740), section 4.2; Kool et al. 2019. Unbiased, because the
    baseline of a member does not depend on it; equal to ``n / (n - 1)`` times the centred return.
    """
    n = int(np.count_nonzero(~np.isnan(returns)))
    if n < 2:
        return np.full_like(returns, np.nan)
    return dr_grpo(returns) * (n / (n - 1))


def batch_mean(returns: Array) -> Array:
    """``A_i = R_i - mean(R)`` where the mean runs over the whole batch: REINFORCE with a constant baseline.

    Williams 1992, section 4 (reinforcement comparison). For data without groups, such as collected episodes.
    """
    return dr_grpo(returns)


def turn_level(group: Sequence[Rewards], *, gamma: float = 1.0, std: bool = True) -> list[Array]:
    """Reward-to-go of each step minus the group's mean reward-to-go at that step; one array [steps] per member.

    The process-supervised form of GRPO (Shao et al. 2024, section 4.1.3) with a baseline per step index instead of one
    per group, so that what a step could no longer change does not count for it. ``std`` divides by the standard
    deviation of the group's returns, the same for every step. A step index that only one member reached gives 0.
    """
    to_go = [reward_to_go(rewards, gamma) for rewards in group]
    baseline = _per_step_mean(to_go)
    scale = _std(np.array([episode_return(r) for r in group])) + EPSILON if std else 1.0
    return [(g - baseline[: len(g)]) / scale for g in to_go]


def gae(
    group: Sequence[Rewards], values: Sequence[Array] | None = None, *, gamma: float = 1.0, lam: float = 1.0
) -> list[Array]:
    """Generalised advantage estimation over steps instead of tokens; one array [steps] per member.

    ``delta_k = r_k + gamma V_{k+1} - V_k``, ``A_k = sum_l (gamma lam)^l delta_{k+l}``, ``V`` past the end is 0
    (Schulman et al. 2016, arXiv 1506.02438, eq. 11-16). ``values`` holds V of each step of each member.

    Without ``values`` there is no critic, and V is the group's mean reward-to-go at each step index. That makes
    ``lam=1`` equal to :func:`turn_level` with ``std=False``; a smaller ``lam`` trades variance for the bias of this V,
    which knows how far an episode is but not how it stands. A step with nothing measured from it on stays NaN.
    """
    to_go = [reward_to_go(rewards, gamma) for rewards in group]
    if values is None:
        baseline = _per_step_mean(to_go)
        values = [baseline[: len(g)] for g in to_go]
    out = []
    for rewards, g, v in zip(group, to_go, values, strict=True):
        if len(v) != len(rewards):
            raise ConfigError(f"gae: expected one value per step, got {len(v)} values for {len(rewards)} steps")
        advantages = np.full(len(rewards), np.nan)
        ahead, next_value = 0.0, 0.0
        for k in range(len(rewards) - 1, -1, -1):
            if np.isnan(g[k]):
                continue  # nothing measured from here on: the episode ends, for learning, at the last measured step
            delta = (rewards[k] or 0.0) + gamma * next_value - v[k]
            ahead = delta + gamma * lam * ahead
            advantages[k], next_value = ahead, v[k]
        out.append(advantages)
    return out


def estimate(
    kind: Advantage, group: Sequence[Rewards], *, gamma: float = 1.0, lam: float = 1.0, std: bool = True
) -> list[Array]:
    """Advantages of one group by the estimator's name: one array [steps] per member, NaN where there is none.

    ``std`` concerns ``turn`` and ``grpo``; ``gamma`` concerns ``turn`` and ``gae``; ``lam`` concerns ``gae``. For
    ``batch`` the group is the whole batch. Raises ``ConfigError`` for an unknown name.
    """
    if kind == "turn":
        return turn_level(group, gamma=gamma, std=std)
    if kind == "gae":
        return gae(group, gamma=gamma, lam=lam)
    episode_level: dict[str, Callable[[Array], Array]] = {
        "grpo": lambda r: grpo(r, std=std),
        "drgrpo": dr_grpo,
        "rloo": rloo,
        "batch": batch_mean,
    }
    if kind not in episode_level:
        raise ConfigError(f"no advantage named {kind!r}; expected one of turn, gae, {', '.join(episode_level)}")
    returns = np.array([episode_return(rewards) for rewards in group])
    return [np.full(len(r), a) for r, a in zip(group, episode_level[kind](returns), strict=True)]


def _per_step_mean(to_go: Sequence[Array]) -> Array:
    """Mean over the members that have a return at each step index; shape [longest member]."""
    longest = max((len(g) for g in to_go), default=0)
    table = np.full((len(to_go), longest), np.nan)
    for row, g in zip(table, to_go, strict=True):
        row[: len(g)] = g
    counts = np.count_nonzero(~np.isnan(table), axis=0)
    sums: Array = np.nansum(table, axis=0)
    means: Array = np.divide(sums, counts, out=np.full(longest, np.nan), where=counts > 0)
    return means


def _mean(values: Array) -> float:
    measured = values[~np.isnan(values)]
    return float(measured.mean()) if len(measured) else float("nan")


def _std(values: Array) -> float:
    measured = values[~np.isnan(values)]
    return float(measured.std(ddof=1)) if len(measured) > 1 else 0.0
