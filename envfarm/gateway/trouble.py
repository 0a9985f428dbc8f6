"""What keeps failing is left alone for a while that grows: causes with a time until which not to try again. Pure."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from envfarm.core.errors import Unavailable

Clock = Callable[[], float]


class Trouble:
    """Failures in a row, the latest cause, and when to try again: ``first`` seconds, then twice as long each time.

    Half of the wait is jitter from its second half on, so that many gateways do not ask together.
    """

    def __init__(self, first: float, most: float, clock: Clock = time.monotonic) -> None:
        self._first = first
        self._most = most
        self._clock = clock
        self._until = 0.0
        self.failures = 0
        self.cause = ""

    def __bool__(self) -> bool:
        """Whether the last try failed."""
        return bool(self.cause)

    @property
    def left(self) -> float:
        """Seconds until the next try."""
        return max(0.0, self._until - self._clock())

    def failed(self, cause: str, hint: float | None = None) -> None:
        """A try failed; ``hint``: seconds that whoever refused wants to be left alone, at least."""
        wait = min(self._most, self._first * 2.0 ** min(self.failures, 32)) * random.uniform(0.75, 1.0)
        self.failures += 1
        self.cause = cause
        self._until = self._clock() + max(wait, hint or 0.0)

    def over(self) -> None:
        """A try went well."""
        self.failures, self.cause, self._until = 0, "", 0.0


def refusal(text: str, retry_after: float) -> Unavailable:
    """The error for what is left alone, with a hint when to ask again."""
    error = Unavailable(f"{text}; tried again in {retry_after:.0f} s")
    error.retry_after_s = max(retry_after, 0.1)
    return error
