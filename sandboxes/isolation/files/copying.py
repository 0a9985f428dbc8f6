"""Copies a tree of files that may be changing meanwhile, and keeps what makes it the same tree. Blocking.

Kept: contents with their holes, modes, times, links, hard links within the tree, named pipes, empty folders, ``user.*``
attributes, and what an overlay notes in its upper layer (removed and replaced folders). Left out: sockets and devices.
Files are copied one after the other, so that a tree that is written to meanwhile is not the tree of one moment.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from envfarm.core.errors import SandboxError
from sandboxes.isolation.files.descriptors import by_force
from sandboxes.isolation.files.descriptors import folder as opened
from sandboxes.isolation.files.interruptible import Interrupted

MAX_DEPTH = 128
_CHUNK = 8 << 20
_FICLONE = 0x40049409
OPAQUE = ("user.overlay.opaque", "trusted.overlay.opaque")
# Removed, or replaced by something else, since the folder was read.
_CHANGED = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO)
_OTHER_WAYS = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


class TreeCopy:
    """Copies trees one after the other and counts. ``owners``: whose files become whose; others keep their owner."""

    def __init__(
        self, *, stop: threading.Event, owners: tuple[int | None, int | None] = (None, None), room: int | None = None
    ) -> None:
        self.files = 0  # entries but folders
        self.size = 0  # bytes of regular files
        self._stop = stop
        self._owners = owners
        self._room = room
        self._is_root = os.geteuid() == 0
        self._clones = True
        self._linked: dict[tuple[int, int], tuple[int, str]] = {}

    def tree(self, source: Path, target: Path) -> None:
        """Copy what is in ``source`` into the empty folder ``target``. Raises ``OSError``, ``SandboxError``."""
        with opened(source.parent) as parent, opened(target) as there:
            self._folder(source.name, parent, there, there, "", 0)

    def _folder(self, name: str, parent: int, target: int, top: int, path: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise SandboxError(f"folders are nested deeper than {MAX_DEPTH} levels: {path[:100]}...")
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
        with by_force(name, parent, is_folder=True) as source:
            with os.scandir(source) as scan:
                names = [entry.name for entry in scan]
            for inner in names:
                if self._stop.is_set():
                    raise Interrupted
                self._entry(inner, source, target, top, f"{path}{inner}", depth)
            self._finish(source, target, info)

    def _entry(self, name: str, source: int, target: int, top: int, path: str, depth: int) -> None:
        try:
            info = os.stat(name, dir_fd=source, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                os.mkdir(name, 0o700, dir_fd=target)
                with opened(name, target) as there:
                    self._folder(name, source, there, top, f"{path}/", depth + 1)
            elif info.st_nlink == 1 or not self._link_again(info, name, target, top):
                self._leaf(name, info, source, target)
                if info.st_nlink > 1:
                    self._linked[info.st_dev, info.st_ino] = (top, path)
        except OSError as error:
            if error.errno not in _CHANGED:
                raise

    def _leaf(self, name: str, info: os.stat_result, source: int, target: int) -> None:
        kind = stat.S_IFMT(info.st_mode)
        if kind == stat.S_IFREG:
            self._file(name, info, source, target)
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
            self._own(name, target, info)
        elif kind == stat.S_IFIFO:
            os.mkfifo(name, stat.S_IMODE(info.st_mode), dir_fd=target)
            self._own(name, target, info)
        elif kind == stat.S_IFCHR and info.st_rdev == 0:  # how an overlay notes that a file was removed
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)
        else:
            return
        self.files += 1

    def _link_again(self, info: os.stat_result, name: str, target: int, top: int) -> bool:
        first = self._linked.get((info.st_dev, info.st_ino))
        if first is None or first[0] != top:
            return False  # in another tree, it cannot be the same file
        os.link(first[1], name, src_dir_fd=top, dst_dir_fd=target, follow_symlinks=False)
        self.files += 1
        return True

    def _file(self, name: str, seen: os.stat_result, source: int, target: int) -> None:
        with by_force(name, source, is_folder=False) as here:
            info = os.fstat(here)
            if not stat.S_ISREG(info.st_mode):
                return
            there = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target)
            try:
                self._data(here, there, info.st_size)
                self._finish(here, there, seen)  # its mode before it was opened by force
                self._count(os.fstat(there))
            finally:
                os.close(there)

    def _count(self, info: os.stat_result) -> None:
        self.size += info.st_size
        if self._room is not None:
            self._room -= info.st_blocks * 512
            if self._room < 0:
                raise OSError(errno.ENOSPC, "")

    def _data(self, source: int, target: int, size: int) -> None:
        if self._clones and size:
            try:
                fcntl.ioctl(target, _FICLONE, source)
            except OSError:
                self._clones = False  # between these two file systems
            else:
                return
        for start, end in extents(source, size):
            self._range(source, target, start, end)
        os.ftruncate(target, size)

    def _range(self, source: int, target: int, start: int, end: int) -> None:
        while start < end:
            if self._stop.is_set():
                raise Interrupted
            copied = _copy_range(source, target, start, min(_CHUNK, end - start))
            if not copied:
                return  # cut short since
            start += copied

    def _finish(self, source: int, target: int, info: os.stat_result) -> None:
        if self._is_root:
            os.fchown(target, *self._mapped(info))
        os.fchmod(target, stat.S_IMODE(info.st_mode))
        copy_attributes(source, target)
        os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))

    def _own(self, name: str, target: int, info: os.stat_result) -> None:
        if self._is_root:
            os.chown(name, *self._mapped(info), dir_fd=target, follow_symlinks=False)
        os.utime(name, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=target, follow_symlinks=False)

    def _mapped(self, info: os.stat_result) -> tuple[int, int]:
        old, new = self._owners
        if old is None or new is None:
            return info.st_uid, info.st_gid
        return (new if info.st_uid == old else info.st_uid), (new if info.st_gid == old else info.st_gid)


def extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Where a file of ``size`` bytes has data: pairs of start and end, the holes between them left out."""
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # a hole up to the end
            raise
        if start >= size:
            return
        end = min(size, os.lseek(fd, start, os.SEEK_HOLE))
        yield start, end


def copy_attributes(source: int, target: int) -> None:
    """Copy ``user.*`` attributes, and the mark of a folder that hides the one beneath it."""
    for name in attributes(source):
        with contextlib.suppress(OSError):
            os.setxattr(target, name, os.getxattr(source, name))


def attributes(fd: int) -> list[str]:
    """Names of the attributes that belong to the tree."""
    try:
        names = os.listxattr(fd)
    except OSError:
        return []  # this file system has none
    return [n for n in names if n in OPAQUE or (n.startswith("user.") and not n.startswith("user.overlay."))]


def _copy_range(source: int, target: int, start: int, count: int) -> int:
    try:
        return os.copy_file_range(source, target, count, start, start)
    except OSError as error:
        if error.errno not in _OTHER_WAYS:
            raise
    return os.pwrite(target, os.pread(source, min(count, _CHUNK), start), start)
