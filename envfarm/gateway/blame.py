"""Which environment loses hosts: code that ends its process in ``reset`` or in a tool takes every other episode along.

A host tells nothing when it dies, so the evidence is what was under way in it. Of the environments that were under way
in each of several losses, the one with the least under way is blamed: a busy one is there by chance. Whoever is held
back wrongly is free again after the back-off, and the next losses point at another.
"""

from __future__ import annotations

import time
from collections import Counter

import msgspec

from envfarm.core.pool import Suspension
from envfarm.gateway.trouble import Clock, Trouble, refusal

LOSSES = 3
WINDOW_SECONDS = 60.0
FIRST_SECONDS = 30.0
MOST_SECONDS = 900.0
FORGET_SECONDS = 1800.0  # without another suspension: the next one is as short as a first


class _Loss(msgspec.Struct):
    at: float
    cause: str
    under_way: Counter[str]  # environment → commands that the host did not answer


class Blame:
    """Counts losses of hosts by what was under way in them, and holds environments back."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._losses: dict[str, _Loss] = {}
        self._held: dict[str, tuple[Trouble, float]] = {}  # with when it was held back last

    def note(self, host_id: str, environment: str, cause: str) -> None:
        """A command of ``environment`` was under way in a host when that was lost."""
        loss = self._losses.get(host_id)
        if loss is None:
            loss = self._losses[host_id] = _Loss(self._clock(), cause, Counter())
        loss.under_way[environment] += 1

    def check(self, environment: str) -> None:
        """Raises ``Unavailable`` with the cause and a hint while ``environment`` is held back."""
        if self._losses:
            self._judge()
        if environment in self._held:
            trouble, _ = self._held[environment]
            if trouble.left > 0:
                raise refusal(trouble.cause, trouble.left)

    def suspended(self) -> list[Suspension]:
        """Those that are held back now, by name."""
        self._judge()
        return [
            Suspension(environment=name, cause=trouble.cause, retry_in_s=trouble.left)
            for name, (trouble, _) in sorted(self._held.items())
            if trouble.left > 0
        ]

    def _judge(self) -> None:
        now = self._clock()
        self._losses = {host: loss for host, loss in self._losses.items() if now - loss.at <= WINDOW_SECONDS}
        while len(self._losses) >= LOSSES:
            seen = Counter(name for loss in self._losses.values() for name in loss.under_way)
            most = max(seen.values())
            if most < LOSSES:
                return
            suspects = [name for name, count in seen.items() if count == most]
            guilty = min(suspects, key=lambda name: sum(loss.under_way[name] for loss in self._losses.values()))
            self._hold(guilty, now)

    def _hold(self, name: str, now: float) -> None:
        """Hold ``name`` back; the losses that it explains tell nothing about others."""
        explained = [host for host, loss in self._losses.items() if name in loss.under_way]
        last = self._losses[explained[-1]].cause
        for host in explained:
            del self._losses[host]
        trouble, before = self._held.get(name) or (Trouble(FIRST_SECONDS, MOST_SECONDS, self._clock), now)
        if now - before > FORGET_SECONDS:
            trouble.over()
        trouble.failed(
            f"environment {name!r} is held back: {len(explained)} hosts were lost within {WINDOW_SECONDS:.0f} s "
            f"while it was being opened or stepped, the last one because {last}"
        )
        self._held[name] = (trouble, now)
