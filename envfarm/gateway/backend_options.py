"""Options of a backend from the command line: ``--backend-option KEY=VALUE``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from envfarm.core.errors import ConfigError
from envfarm.core.suggestions import did_you_mean

_GIVEN = ("environments", "slots", "max_hosts")  # by flags of their own


def parsed(texts: Sequence[str]) -> dict[str, Any]:
    """``KEY=VALUE`` words as keyword arguments: numbers, ``true`` and ``false`` are values, all else is text.

    Raises :class:`ConfigError` for a word of another shape.
    """
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key.isidentifier():
            raise ConfigError(f"--backend-option {text!r}: expected KEY=VALUE")
        options[key] = _value(value)
    return options


def check(backend: str, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises :class:`ConfigError` for an option that ``make`` does not take, with those that it does."""
    known = [
        name
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in _GIVEN
    ]
    for key in options:
        if key not in known:
            there = ", ".join(known) or "none"
            hint = did_you_mean(key, known)
            raise ConfigError(f"the backend {backend!r} has no option {key!r}{hint} (there is: {there})")


def _value(text: str) -> Any:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return value if isinstance(value, (bool, int, float)) else text
