"""What a host itself is in: told by whoever made it, since a process cannot tell for sure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from envfarm.core.sandbox import Isolation


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """``inside``: ``container`` or ``pod`` when the host runs in one, or ``none``.

    ``image``: name of the container image that commands see as their root, and ``root`` the folder that holds its
    files (never written to); both empty: commands see the host's own system. ``env`` and ``workdir``: variables and
    working folder that the image gives to commands; its Dockerfile's ENV and WORKDIR.
    """

    inside: Isolation = Isolation.NONE
    image: str = ""
    root: Path | None = None
    env: Mapping[str, str] = msgspec.field(default_factory=dict)
    workdir: str = ""


MACHINE = Surroundings()
