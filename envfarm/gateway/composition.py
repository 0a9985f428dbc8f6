"""From one step to its reward: every part measured and stored, the weighted and capped ones summed."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import partial
from math import inf, isfinite
from typing import Any

from envfarm.core import plugins
from envfarm.core.rewards import RewardSettings, StepContext

log = logging.getLogger(__name__)
Part = Callable[[StepContext], float | None]


class Composition:
    """The parts of one run's or environment's settings; immutable, shared by its episodes."""

    def __init__(self, parts: Mapping[str, Callable[..., float | None]], settings: RewardSettings) -> None:
        self.settings = settings
        self._parts: tuple[tuple[str, Part], ...] = tuple(
            (name, partial(part, gamma=settings.gamma) if _takes_gamma(part) else part) for name, part in parts.items()
        )
        self.names = tuple(parts)
        self._weights = tuple((name, weight, settings.caps.get(name, inf)) for name, weight in settings.weights.items())

    def __call__(self, step: StepContext) -> tuple[dict[str, float | None], float | None]:
        """Parts by name, and ``sum(weight * clip(part, -cap, cap))`` over those that were measured.

        The environment's own signals stand beside the library's parts; one of the same name takes its place. The
        reward is ``None`` when nothing weighted was measured. An outcome that is not trainable carries neither
        parts nor a reward.
        """
        if step.outcome is not None and not step.outcome.trainable:
            return dict.fromkeys((*self.names, *step.signals)), None
        values = self._measure(step)
        if step.signals:
            values.update(step.signals)
        total: float | None = None
        for name, weight, cap in self._weights:
            value = values.get(name)
            if value is None:
                continue
            if not -cap <= value <= cap:
                value = cap if value > 0 else -cap
            total = weight * value if total is None else total + weight * value
        return values, total

    def _measure(self, step: StepContext) -> dict[str, float | None]:
        try:
            values = {name: part(step) for name, part in self._parts}
            if isfinite(sum([value for value in values.values() if value is not None])):
                return values
        except Exception:  # of whoever wrote the part; the slow way below finds out which, and says so
            log.debug("one of the parts cannot be measured", exc_info=True)
        return {name: _measured(name, part, step) for name, part in self._parts}


class Compositions:
    """Makes compositions from the registered parts (entry points ``envfarm.rewards``); equal settings share one."""

    def __init__(self, parts: Mapping[str, Callable[..., float | None]] | None = None, *, most: int = 256) -> None:
        self._parts = plugins.load_all("envfarm.rewards") if parts is None else parts
        self._known: dict[Any, Composition] = {}
        self._most = most

    def of(self, settings: RewardSettings) -> Composition:
        """The composition of ``settings``. A weight without a part is no error: a signal may have that name."""
        key = (tuple(settings.weights.items()), tuple(settings.caps.items()), settings.gamma)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= self._most:
                self._known.pop(next(iter(self._known)))
            found = self._known[key] = Composition(self._parts, settings)
        return found


def _takes_gamma(part: Callable[..., Any]) -> bool:
    try:
        return "gamma" in inspect.signature(part).parameters
    except (TypeError, ValueError):
        return False


def _measured(name: str, part: Part, step: StepContext) -> float | None:
    """The part's value; one that raises or is not finite was not measured."""
    try:
        value = part(step)
    except Exception:  # a part is user code: its fault must cost no step
        log.warning("reward part %r raised; this step goes without it", name, exc_info=True)
        return None
    return value if value is None or isfinite(value) else None
