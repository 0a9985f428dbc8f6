"""``efficiency``: a cost for work that could not help. Never positive, so that doing less is no way to score.

A weight of 0.05 to 0.2 (with ``completion`` at 1) keeps it a tie-breaker between successful episodes.
"""

from __future__ import annotations

from envfarm.core.rewards import StepContext

STEP_COST = 0.1


def efficiency_part(step: StepContext) -> float | None:
    """In [-1, 0]: minus the share of this step's calls that repeat earlier ones, minus a cost for late steps.

    A call is a repeat when an earlier step made it with the same arguments. The cost of a step rises from 0 to 0.1
    over the second half of ``limits.steps``: a task has its budget for a reason, and the first half is free.
    ``None`` for a first message without calls, which has nothing to repeat and no step behind it.
    """
    calls = len(step.message.tool_calls)
    if not calls and step.index == 0:
        return None
    repeats = min(step.repeated_calls / calls, 1.0) if calls else 0.0
    return max(-1.0, -repeats - STEP_COST * _lateness(step.index, step.limits.steps))


def _lateness(index: int, steps: int) -> float:
    """0 in the first half of the budget, then linear to 1 at its last step; 0 when the budget is one step."""
    half = (steps - 1) / 2
    return min(max(index - half, 0.0) / half, 1.0) if half > 0 else 0.0
