"""What a reward part sees and returns. The library of parts is the top-level package ``rewards``.

A part is a pure function of one step. ``None`` means *not measured*; it is never the same as ``0.0``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import msgspec

from envfarm.core.messages import AssistantMessage, ToolResult
from envfarm.core.outcome import Outcome
from envfarm.core.task import Limits


class StepContext(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known about one step once the environment has answered it.

    ``progress_before`` and ``progress_after`` are the environment's potential in [0, 1] (``None``: no potential);
    ``completion`` is ``verify()`` in [0, 1] when the step ended the episode (``None``: not ended, or cannot be judged);
    ``repeated_calls`` counts calls of this step that an earlier step of the episode already made, arguments and all;
    ``signals`` are the environment's own reward functions, by name.
    """

    index: int
    limits: Limits
    message: AssistantMessage
    results: tuple[ToolResult, ...]
    progress_before: float | None
    progress_after: float | None
    completion: float | None
    repeated_calls: int
    sampled_tokens: int | None
    done: bool
    outcome: Outcome | None
    signals: Mapping[str, float | None]


@runtime_checkable
class RewardPart(Protocol):
    """A named function of one step. Registered under the entry-point group ``envfarm.rewards``."""

    def __call__(self, step: StepContext, /) -> float | None:
        """The unweighted value of this part, or ``None`` when it was not measured."""
        ...


class RewardSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How parts become one number per step: ``sum(weight[p] * clip(part[p], -cap[p], cap[p]))`` over measured parts.

    A part without a weight is measured and stored, but does not count. ``gamma`` discounts the potential.
    """

    weights: dict[str, float] = {}
    caps: dict[str, float] = {}
    gamma: float = 1.0
