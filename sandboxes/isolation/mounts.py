"""Mounts that only this process and its children see.

A host gets one folder of its own, a tmpfs in a mount namespace of its own. Workspaces lie in it, each a tmpfs with a
bounded size, and all of it is gone with the process, however that ends. Where the host is root, sandboxed commands
are a user who owns nothing on this machine (see :mod:`sandboxes.isolation.user`) and who may not be able to reach the
interpreter by its usual path: then a read-only view of it lies there too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil

from envfarm.core.errors import SandboxError
from sandboxes.isolation.files.removal import empty_folder

_PREFIX = "envfarm-host-"
_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_NOSUID, _NODEV, _RDONLY, _REMOUNT, _BIND, _MOVE, _REC, _SLAVE = 2, 4, 1, 32, 4096, 8192, 16384, 1 << 19
_DETACH = 2
_FILE_BYTES = 4096
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

    Call once, before the process has threads: a mount namespace belongs to a thread and what it starts. Raises
    :class:`SandboxError` where no folder can be made.
    """
    global _private, _python
    root = os.geteuid() == 0
    try:
        parent = _parent()
        ground = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
    except OSError as error:
        raise SandboxError(
            f"no folder for workspaces can be made ({error}); "
            "make room in the folder for temporary files and let this user write there"
        ) from error
    if root:
        ground.chmod(0o711)  # sandboxed commands are somebody else and must pass
    if not _private and (root or _try_in_child(_enter)):
        _private = _enter()
    if _private and tmpfs(ground, 1 << 20, mode=0o711 if root else 0o700, owner=os.geteuid()) and root:
        view = ground / "python"
        view.mkdir(mode=0o755)
        if bind_read_only(Path(sys.base_prefix).resolve(), view):
            _python = view
    return ground


def _enter() -> bool:
    """Go into a mount namespace of our own; for who is not root, in a user namespace where they stay who they are."""
    user, group = os.geteuid(), os.getegid()
    if _libc.unshare(_NEWNS if user == 0 else _NEWNS | _NEWUSER) != 0:
        return False
    if user != 0:
        try:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        except OSError:
            return False
    return bool(_libc.mount(b"none", b"/", None, _REC | _SLAVE, None) == 0)


def _try_in_child(attempt: Callable[[], bool]) -> bool:
    """Whether ``attempt`` works, found out where its failure does no harm. Only for a process without threads."""
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - names are enough
        return False
    child = os.fork()
    if child == 0:
        worked = False
        try:
            worked = attempt()
        finally:
            os._exit(0 if worked else 1)
    return os.waitpid(child, 0)[1] == 0


def _parent() -> Path:
    return Path("/tmp" if os.geteuid() == 0 else tempfile.gettempdir())  # noqa: S108 - every user can reach it


def sweep() -> int:
    """Remove the folders of hosts that were killed; returns how many."""
    removed = 0
    for folder in _parent().glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            with contextlib.suppress(OSError):
                empty_folder(folder)
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


def tmpfs(path: Path, size: int, *, mode: int = 0o700, owner: int = 0, group: int | None = None) -> bool:
    """Mount an empty tmpfs of at most ``size`` bytes, one file per 4 KiB, on ``path``."""
    gid = owner if group is None else group
    options = f"size={size},mode={mode:o},uid={owner},gid={gid},nr_inodes={max(1024, size // _FILE_BYTES)}"
    return bool(_libc.mount(b"envfarm", bytes(path), b"tmpfs", _NOSUID | _NODEV, options.encode()) == 0)


def used_bytes(path: Path) -> int:
    """Bytes that the files of a :func:`tmpfs` take there, or would if each had a block, as its room is for files."""
    room = os.statvfs(path)
    return max((room.f_blocks - room.f_bfree) * room.f_frsize, (room.f_files - room.f_ffree) * _FILE_BYTES)


def overlay(lower: Path, upper: Path, work: Path, target: Path) -> str:
    """Show ``lower`` at ``target``, with what is changed there kept in ``upper``. Returns why not, or nothing.

    Marks go into ``user.*`` attributes, the only ones that may be written in a user namespace; a tmpfs keeps them
    since Linux 6.6, so that elsewhere the usual attributes are tried as well.
    """
    options = f"lowerdir={_escaped(lower)},upperdir={_escaped(upper)},workdir={_escaped(work)}"
    for more in (",userxattr", ",redirect_dir=off,metacopy=off,index=off"):
        if _libc.mount(b"envfarm", bytes(target), b"overlay", _NOSUID | _NODEV, (options + more).encode()) == 0:
            return ""
    return os.strerror(ctypes.get_errno())


def _escaped(path: Path) -> str:
    return "".join(f"\\{c}" if c in ":,\\" else c for c in str(path))


def move(source: Path, target: Path) -> bool:
    """Move a mount, with the mounts in it, to another folder; what looks on from inside sees no moment without it."""
    return bool(_libc.mount(bytes(source), bytes(target), None, _MOVE, None) == 0)


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
