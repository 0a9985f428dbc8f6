"""``tool``: whether the calls of a step ran. A signal per step long before the outcome is known.

A call that runs is not yet a call that helps: keep the weight small (0.05 to 0.2 with ``completion`` at 1), and
watch it with :mod:`rewards.audit`, since calling any tool at all can raise it.
"""

from __future__ import annotations

from envfarm.core.messages import Diagnosis, ToolStatus
from envfarm.core.rewards import StepContext

MALFORMED = frozenset({Diagnosis.SYNTAX, Diagnosis.TRUNCATED})


def tool_part(step: StepContext) -> float | None:
    """Share of calls that ran minus share that did not (error, invalid, time-out), in [-1, 1].

    ``None`` for a message without calls, and when the results are missing though nothing was malformed.
    A malformed message counts as one call more that did not run.
    """
    failed = sum(result.status is not ToolStatus.OK for result in step.results)
    ran = len(step.results) - failed
    failed += step.message.diagnosis in MALFORMED
    total = ran + failed
    return (ran - failed) / total if total else None
