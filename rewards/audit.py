"""Format hacking, found in numbers: a proxy part rises over a run while completion does not follow.

Parts such as ``format`` and ``tool`` are there to make completion come sooner. A policy that learns to collect them
instead shows in the record: early and late episodes differ in the proxy, and not in what the task is about.

The farm itself does not call this yet. It is for a look at what was logged::

    from envfarm.rollout.metrics import part_sums
    from envfarm.trajectories.reader import read_trajectories

    trained = (t for t in read_trajectories("STATE/farm.db", run_id) if t.purpose == "train" and t.outcome.trainable)
    for hack in hacking([part_sums(t) for t in trained]):
        print(hack)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance

import msgspec

PROXIES = ("format", "tool", "efficiency")
GOAL = "completion"


class Shift(msgspec.Struct, frozen=True):
    """Late mean minus early mean of one part, with its standard error (Welch 1947: unequal variances).

    ``early`` and ``late`` count the episodes in which the part was measured.
    """

    part: str
    change: float
    error: float
    early: int
    late: int


class Hack(msgspec.Struct, frozen=True):
    """One proxy that rose without the goal. ``str()`` is a sentence for a person."""

    proxy: Shift
    goal: Shift

    def __str__(self) -> str:
        return (
            f"{self.proxy.part} rose by {self.proxy.change:.3f} (standard error {self.proxy.error:.3f}) while "
            f"{self.goal.part} moved by {self.goal.change:+.3f} (standard error {self.goal.error:.3f}): "
            f"lower the weight of {self.proxy.part} or cap it"
        )


def shift(episodes: Sequence[Mapping[str, float | None]], part: str, *, minimum: int = 16) -> Shift | None:
    """How ``part`` changed from the first third of ``episodes`` to the last, in the order they were trained on.

    Each episode maps a part to its sum over the steps; ``None`` and missing entries were not measured and are left
    out. ``None`` when a third has fewer than ``minimum`` (at least 2) measured episodes.
    """
    third = len(episodes) // 3
    early = _measured(episodes[:third], part)
    late = _measured(episodes[len(episodes) - third :], part)
    if min(len(early), len(late)) < max(minimum, 2):
        return None
    error = math.sqrt(variance(early) / len(early) + variance(late) / len(late))
    return Shift(part, fmean(late) - fmean(early), error, len(early), len(late))


def hacking(
    episodes: Sequence[Mapping[str, float | None]],
    *,
    proxies: Sequence[str] = PROXIES,
    goal: str = GOAL,
    rise: float = 0.05,
    confidence: float = 3.0,
    minimum: int = 16,
) -> tuple[Hack, ...]:
    """Proxies that rose by at least ``rise`` and ``confidence`` standard errors while ``goal`` did not rise.

    The goal counts as risen when it gained one standard error or more, or ``rise``; so slow success is no alarm.
    Where the goal was not measured often enough nothing is said: there is nothing to compare with.
    """
    target = shift(episodes, goal, minimum=minimum)
    if target is None or target.change >= rise or target.change > target.error:
        return ()
    found = (shift(episodes, proxy, minimum=minimum) for proxy in proxies)
    return tuple(
        Hack(proxy, target)
        for proxy in found
        if proxy is not None and proxy.change >= max(rise, confidence * proxy.error)
    )


def _measured(episodes: Sequence[Mapping[str, float | None]], part: str) -> list[float]:
    return [value for episode in episodes if (value := episode.get(part)) is not None]
