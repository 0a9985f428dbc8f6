"""How an episode ended. Only the first three kinds say something about the policy; the last two carry no reward.

An infrastructure failure is never a reward: :attr:`Outcome.trainable` is the one place that decides it.
"""

from __future__ import annotations

import enum

import msgspec


class OutcomeKind(enum.StrEnum):
    """The five ways in which an episode ends."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    POLICY_FAILED = "policy_failed"
    INFRA_FAILED = "infra_failed"
    ABORTED = "aborted"


class Outcome(msgspec.Struct, frozen=True):
    """A kind, and the limit, reason, cause or actor that goes with it (empty for ``completed``)."""

    kind: OutcomeKind
    detail: str = ""

    @property
    def trainable(self) -> bool:
        """Whether rewards of this episode may be used: not for ``infra_failed`` and ``aborted``."""
        return self.kind not in (OutcomeKind.INFRA_FAILED, OutcomeKind.ABORTED)

    def __str__(self) -> str:
        return f"{self.kind.value}({self.detail})" if self.detail else self.kind.value

    @classmethod
    def completed(cls) -> Outcome:
        """The environment said that the episode is over."""
        return cls(OutcomeKind.COMPLETED)

    @classmethod
    def truncated(cls, limit: str) -> Outcome:
        """A limit ended it: ``steps``, ``tokens``, ``context`` or ``time``."""
        return cls(OutcomeKind.TRUNCATED, limit)

    @classmethod
    def policy_failed(cls, reason: str) -> Outcome:
        """The policy made going on impossible."""
        return cls(OutcomeKind.POLICY_FAILED, reason)

    @classmethod
    def infra_failed(cls, cause: str) -> Outcome:
        """Something of the farm broke; says nothing about the policy."""
        return cls(OutcomeKind.INFRA_FAILED, cause)

    @classmethod
    def aborted(cls, by: str) -> Outcome:
        """Somebody stopped it: a person, a breaker, a shutdown."""
        return cls(OutcomeKind.ABORTED, by)
