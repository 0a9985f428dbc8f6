"""Mounts that only this process and its children see, for a host that runs as root.

Sandboxed commands then run as a user who owns nothing on this machine (see :mod:`sandboxes.isolation.user`), and who
may not be able to reach the interpreter or a workspace by their usual paths. So a host gets one folder of its own, a
tmpfs in a mount namespace of its own: workspaces and a read-only view of the interpreter lie in it, and all of it is
gone with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
import tempfile
from pathlib import Path

import psutil

_PREFIX = "envfarm-host-"
_CLONE_NEWNS = 0x00020000
_NOSUID, _NODEV, _RDONLY, _REMOUNT, _BIND, _REC, _SLAVE = 2, 4, 1, 32, 4096, 16384, 1 << 19
_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)
_private = False
_python: Path | None = None


def private() -> bool:
    """Whether this process has mounts of its own."""
    return _private


def prefix() -> tuple[Path, Path]:
    """Where the interpreter's files can be read, and where they must appear inside a sandbox."""
    real = Path(sys.base_prefix).resolve()
    return _python or real, real


def own_ground() -> Path:
    """A fresh folder for workspaces; with mounts of its own where this process may have them.

    Call once, before the process has threads: a mount namespace belongs to a thread and what it starts.
    """
    global _private, _python
    root = os.geteuid() == 0
    ground = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_parent()))
    if not root:
        return ground
    ground.chmod(0o711)
    if not _private:
        _private = _libc.unshare(_CLONE_NEWNS) == 0 and _libc.mount(b"none", b"/", None, _REC | _SLAVE, None) == 0
    if _private and tmpfs(ground, 1 << 20, mode=0o711):
        view = ground / "python"
        view.mkdir(mode=0o755)
        if bind_read_only(Path(sys.base_prefix).resolve(), view):
            _python = view
    return ground


def _parent() -> Path:
    return Path("/tmp" if os.geteuid() == 0 else tempfile.gettempdir())  # noqa: S108 - every user can reach it


def sweep() -> int:
    """Remove the folders of hosts that were killed; returns how many."""
    removed = 0
    for folder in _parent().glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            for workspace in folder.glob("slot-*"):
                shutil.rmtree(workspace, ignore_errors=True)
            with contextlib.suppress(OSError):
                folder.rmdir()
                removed += 1
    return removed


def leave_ground(ground: Path) -> None:
    """Remove the folder. Never recursive: what is mounted in it belongs to others."""
    global _python
    if _private:
        if _python is not None and unmount(_python):
            _python = None
        unmount(ground)
    for folder in (*ground.glob("*"), ground):
        with contextlib.suppress(OSError):
            folder.rmdir()


def tmpfs(path: Path, size: int, *, mode: int = 0o700, owner: int = 0) -> bool:
    """Mount an empty tmpfs of at most ``size`` bytes, one file per 4 KiB, on ``path``."""
    options = f"size={size},mode={mode:o},uid={owner},gid={owner},nr_inodes={max(1024, size // 4096)}"
    return bool(_libc.mount(b"envfarm", bytes(path), b"tmpfs", _NOSUID | _NODEV, options.encode()) == 0)


def bind_read_only(source: Path, target: Path) -> bool:
    """Show ``source`` at ``target``, read-only."""
    if _libc.mount(bytes(source), bytes(target), None, _BIND, None) != 0:
        return False
    if _libc.mount(None, bytes(target), None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV, None) == 0:
        return True
    unmount(target)
    return False


def unmount(path: Path) -> bool:
    """Take a mount away, at once for everyone who looks by path."""
    return bool(_libc.umount2(bytes(path), _DETACH) == 0)
