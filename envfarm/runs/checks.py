"""What a run may be: names and settings, refused with what was expected."""

from __future__ import annotations

import math

from envfarm.core.errors import ConfigError
from envfarm.core.run import RunSettings
from envfarm.core.trajectory import PURPOSES

_NAME_LENGTH = 200
_LABELS = 64
_AT_LEAST_ONE = ("group_size", "groups_per_version", "max_attempts")
_AT_MOST = {"group_size": 65_536, "groups_per_version": 1_000_000, "max_attempts": 1_000}


def check_name(name: str) -> None:
    """Raises ``ConfigError`` unless ``name`` is a short printable text."""
    if not 0 < len(name) <= _NAME_LENGTH or not name.isprintable():
        raise ConfigError(f"run name {name[:40]!r}: expected 1 to {_NAME_LENGTH} printable characters")


def check_settings(settings: RunSettings) -> None:
    """Raises ``ConfigError`` that names the setting, its value and what was expected."""
    if not settings.environment or not settings.split:
        raise ConfigError("a run needs an environment and a split")
    for field in _AT_LEAST_ONE:
        value = getattr(settings, field)
        if not 1 <= value <= _AT_MOST[field]:
            raise ConfigError(f"{field} is {value}; expected 1 to {_AT_MOST[field]}")
    if settings.groups is not None and settings.groups < 1:
        raise ConfigError(f"groups is {settings.groups}; expected at least 1, or none for a run without end")
    if not 0 <= settings.staleness <= 1_000:
        raise ConfigError(f"staleness is {settings.staleness}; expected 0 (on-policy) to 1000 policy versions")
    if not 0 <= settings.seed < 2**63:
        raise ConfigError(f"seed is {settings.seed}; expected 0 to 2^63-1")
    if not (math.isfinite(settings.temperature) and settings.temperature >= 0):
        raise ConfigError(f"temperature is {settings.temperature}; expected a number of at least 0")
    if settings.purpose not in PURPOSES:
        raise ConfigError(f"purpose is {settings.purpose!r}; expected one of {', '.join(PURPOSES)}")
    if len(settings.labels) > _LABELS:
        raise ConfigError(f"{len(settings.labels)} labels; expected at most {_LABELS}")
