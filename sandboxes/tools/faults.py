"""What goes wrong on a simulated network, the same for every episode with the same seed."""

from __future__ import annotations

import random

import msgspec

from envfarm.core.errors import ConfigError
from envfarm.core.ids import derived_seed


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to one request: ``kind`` is empty when it is answered as usual, after ``seconds``."""

    kind: str = ""  # "timeout", "refused" or "status"
    status: int = 0
    seconds: float = 0.0


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of requests, each in [0, 1] and together at most 1, to which something happens.

    ``timeouts``: no answer in time. ``refused``: no connection. ``errors``: answered with one of ``statuses``.
    ``latency``: every answer takes between so and so many seconds.
    """

    timeouts: float = 0.0
    refused: float = 0.0
    errors: float = 0.0
    statuses: tuple[int, ...] = (500, 502, 503)
    latency: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        """Raises :class:`ConfigError` for shares that are none."""
        shares = (self.timeouts, self.refused, self.errors)
        if not all(0.0 <= share <= 1.0 for share in shares) or sum(shares) > 1.0:
            raise ConfigError(f"shares of faults must be from 0 to 1 and together at most 1, got {shares}")
        if not 0.0 <= self.latency[0] <= self.latency[1]:
            raise ConfigError(f"latency must be (least, most) in seconds, got {self.latency}")
        if self.errors and not self.statuses:
            raise ConfigError("errors need at least one of statuses")

    def drawn(self, seed: int, index: int) -> Fault:
        """What happens to request ``index`` (from 0) of an episode with ``seed``."""
        draw = random.Random(derived_seed("http", seed, index))
        seconds = draw.uniform(*self.latency)
        at = draw.random()
        if at < self.timeouts:
            return Fault(kind="timeout")
        if at < self.timeouts + self.refused:
            return Fault(kind="refused", seconds=seconds)
        if at < self.timeouts + self.refused + self.errors:
            return Fault(kind="status", status=draw.choice(self.statuses), seconds=seconds)
        return Fault(seconds=seconds)


NONE = Faults()
