"""Environments given as ``file.py:Class``: their folders, which hosts read at the same path as the gateway does.

Not when ``mounts`` brings the file's folder already, at the path that the name says.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from envfarm.core.errors import SandboxError

_OURS = ("/dev", "/opt/envfarm", "/proc", "/run", "/sys")  # of a host's container, with all that is in them
_SYSTEM = ("/", "/bin", "/etc", "/home", "/lib", "/lib64", "/opt", "/root", "/sbin", "/tmp", "/usr", "/usr/lib", "/var")  # noqa: S108
_CLOSED = "/root"  # in the host image only root may pass through it


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """What a container needs for environments in files.

    ``mounts``: ``/here:/there`` each. ``workdir``: where names of files start that are no absolute path; empty: there
    are none. ``open``: folders of the image that nobody but root may pass through, and that must be open.
    """

    mounts: tuple[str, ...] = ()
    workdir: str = ""
    open: tuple[str, ...] = ()


def sources(environments: Iterable[str], mounts: Sequence[str], user: int, here: Path) -> Sources:
    """What hosts that run as ``user`` need besides ``mounts``; ``here`` is the gateway's working folder.

    Reads the file system. Raises :class:`SandboxError` for what cannot be brought into a container.
    """
    files = [name.rpartition(":")[0] for name in environments]
    files = [file for file in files if file.endswith(".py")]
    relative = any(not Path(file).is_absolute() for file in files)
    brought = [target or source for source, _, target in (mount.partition(":") for mount in mounts)]
    found: dict[str, None] = {}
    for file in files:
        path = os.path.normpath(here / file)
        if not any(_within(path, target) for target in brought):
            found[_folder(file, path, user)] = None
    outer = [f for f in found if not any(_within(f, other) for other in found if other != f)]
    workdir = str(here) if relative else ""
    closed = any(_within(place, _CLOSED) for place in (*outer, *brought, workdir))
    return Sources(mounts=tuple(outer), workdir=workdir, open=(_CLOSED,) if closed else ())


def _folder(file: str, path: str, user: int) -> str:
    """The folder to be mounted for the file at ``path``."""
    if not Path(path).is_file():
        raise SandboxError(f"environment {file!r}: there is no file {path} to be mounted into hosts' containers")
    folder = str(Path(path).parent)
    if folder in _SYSTEM or any(_within(folder, place) for place in _OURS):
        raise SandboxError(
            f"environment {file!r}: the folder {folder} cannot be mounted over that of a container; "
            "put the file into a folder of its own"
        )
    for place, needed in ((Path(folder), stat.S_IROTH | stat.S_IXOTH), (Path(path), stat.S_IROTH)):
        facts = place.stat()
        if facts.st_uid != user and facts.st_mode & needed != needed:
            raise SandboxError(
                f"environment {file!r}: hosts run as user {user}, who may not read {place}: "
                f"chmod o+r{'x' if place.is_dir() else ''} {place}"
            )
    return folder


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
