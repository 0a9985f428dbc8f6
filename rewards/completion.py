"""``completion``: what the verifier says at the end. The reward that the task is about; give it weight 1."""

from __future__ import annotations

from envfarm.core.rewards import StepContext


def completion_part(step: StepContext) -> float | None:
    """``verify()`` in [0, 1] on the step that ends the episode.

    ``None`` on every other step, when the outcome cannot be judged, and when the farm itself failed: an
    infrastructure failure says nothing about the policy.
    """
    if not step.done or (step.outcome is not None and not step.outcome.trainable):
        return None
    return step.completion
