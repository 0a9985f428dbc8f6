"""``format``: a penalty for malformed calls.

It is never positive. A reward for good form teaches calls that are well formed and solve nothing; a plain penalty,
small beside the completion reward, removes malformed calls and then falls silent. A weight of 0.1 to 0.3 (with
``completion`` at 1) works: the worst step then costs at most a third of what solving the task brings. Cap it
(``RewardSettings.caps``) when the grades below are not enough.
"""

from __future__ import annotations

from envfarm.core.messages import Diagnosis
from envfarm.core.rewards import StepContext

GRADES = {
    Diagnosis.OK: 0.0,
    Diagnosis.NONE: 0.0,  # an answer without a call is form enough; whether it was wise, completion says
    Diagnosis.UNKNOWN_TOOL: -0.5,
    Diagnosis.SCHEMA: -0.5,
    Diagnosis.SYNTAX: -1.0,
    Diagnosis.TRUNCATED: -1.0,
}


def format_part(step: StepContext) -> float | None:
    """In [-1, 0]: 0 for a well-formed message, -0.5 for an unknown tool or unfit arguments, -1 for broken syntax.

    Always measured, because every message has a diagnosis.
    """
    return GRADES[step.message.diagnosis]
