"""Near names for what does not exist, so that a typing error is mended at once."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that ``name`` was probably meant to be; ``None`` when none is near. Bounded time."""
    close = get_close_matches(name[:64], list(known), n=1)
    return close[0] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing when no known name is near."""
    close = nearest(name, known)
    return f"; did you mean {close!r}?" if close else ""
