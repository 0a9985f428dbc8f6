"""``progress``: the dense reward, as a difference of potentials.

Ng, Harada and Russell, "Policy invariance under reward transformations" (ICML 1999), equation 2:
F(s, a, s') = gamma * Phi(s') - Phi(s). Shaping of this form leaves the optimal policy as it was, because over an
episode of n steps it telescopes: sum of gamma^t F_t = gamma^n Phi(s_n) - Phi(s_0).

**Terminal states.** The theorem needs the same potential, by convention 0, in every terminal state; otherwise the
shaping also rewards *where* an episode ends. Farm environments usually want exactly that (partial progress at a
step limit is worth something), so the last potential counts by default, and the part is then a reward for progress,
not pure shaping. ``terminal_zero=True`` is the strict form: the last step pays back all potential gained; register
``functools.partial(progress_part, terminal_zero=True)`` under a name of your own to use it.
"""

from __future__ import annotations

from envfarm.core.outcome import OutcomeKind
from envfarm.core.rewards import StepContext


def progress_part(step: StepContext, gamma: float = 1.0, *, terminal_zero: bool = False) -> float | None:
    """Difference of potentials, gamma * Phi(s') - Phi(s): in [-1, 1] for potentials in [0, 1] and ``gamma`` in [0, 1].

    ``None`` when either potential was not measured. ``terminal_zero`` takes Phi(s') = 0 for a step that ends the
    episode (then Phi(s') need not be measured), but not where a limit cut it: a cut-off state is not terminal.
    """
    after = 0.0 if terminal_zero and _terminal(step) else step.progress_after
    if after is None or step.progress_before is None:
        return None
    return gamma * after - step.progress_before


def _terminal(step: StepContext) -> bool:
    return step.done and not (step.outcome is not None and step.outcome.kind is OutcomeKind.TRUNCATED)
