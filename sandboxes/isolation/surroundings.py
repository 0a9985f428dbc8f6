"""What a host itself is in: told by whoever made it, since a process cannot tell for sure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from envfarm.core.errors import ConfigError
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
SETTINGS = "image.json"  # beside the folder of an image's files: {"env": ["NAME=value", ...], "workdir": "/app"}


class _Settings(msgspec.Struct, frozen=True):
    env: list[str] = []
    workdir: str = ""


def surroundings(*, inside: Isolation, image: str, root: Path | None) -> Surroundings:
    """What a host's flags say, and what stands in :data:`SETTINGS` beside ``root``, if anything does.

    A working folder of / counts as none: commands start in /workspace then. Raises :class:`ConfigError`.
    """
    if root is None:
        return Surroundings(inside=inside, image=image)
    if not root.is_dir():
        raise ConfigError(f"--root {root}: no such folder; give the folder that holds the files of image {image!r}")
    file = root.parent / SETTINGS
    try:
        settings = msgspec.json.decode(file.read_bytes(), type=_Settings) if file.exists() else _Settings()
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as settings of an image: {error}") from error
    if settings.workdir and not settings.workdir.startswith("/"):
        raise ConfigError(f"{file}: workdir {settings.workdir!r} is not an absolute path")
    env = dict(line.split("=", 1) for line in settings.env if "=" in line)
    return Surroundings(inside=inside, image=image, root=root, env=env, workdir=settings.workdir.rstrip("/"))
