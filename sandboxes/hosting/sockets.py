"""Where a host's socket lies: in the state folder, or in a short folder where that path would be too long."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import tempfile
import time
from pathlib import Path

_FOLDERS = Path("/tmp")  # noqa: S108 - short, and everywhere
_PREFIX = "envfarm-socket-"
_YOUNG_SECONDS = 120.0  # a younger one may be of a host that is about to listen
SOCKET_BYTES = 107  # sun_path of unix(7), without the closing zero


def socket_path(usual: Path) -> tuple[Path, str]:
    """``usual`` if its path is short enough, else one in a new folder that only this user can enter.

    Returns the path and the folder made for it (else empty), which is the caller's to remove.
    """
    if len(os.fsencode(usual)) <= SOCKET_BYTES:
        return usual, ""
    folder = tempfile.mkdtemp(prefix=_PREFIX, dir=_FOLDERS)
    return Path(folder, usual.name if len(usual.name) < 32 else "sock"), folder


def remove_socket(path: Path) -> None:
    """Remove a host's socket, and the folder that was made for it, if any."""
    path.unlink(missing_ok=True)
    if path.parent.parent == _FOLDERS and path.parent.name.startswith(_PREFIX):
        with contextlib.suppress(OSError):
            path.parent.rmdir()


def sweep() -> int:
    """Remove folders of this user that were made for sockets on which nobody listens any more; returns how many."""
    removed = 0
    for folder in _FOLDERS.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            info = folder.stat()
            if info.st_uid != os.geteuid() or time.time() - info.st_mtime < _YOUNG_SECONDS:
                continue
            sockets = list(folder.iterdir())
            if not any(_listens(path) for path in sockets):
                for path in sockets:
                    path.unlink()
                folder.rmdir()
                removed += 1
    return removed


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) in (0, errno.EAGAIN)
