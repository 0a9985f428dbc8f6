"""Reads a snapshot from a tar stream that may come from anywhere. Blocking.

Nothing in it is trusted: each name must stand in a folder that this very archive made, links are made and never
followed, devices are refused, and sizes are checked before anything is read.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import msgspec

from envfarm.core.errors import SandboxError
from sandboxes.isolation.files.archive import ATTRIBUTE, CHUNK, DATA, HEAD, HIDES, OWN, SIZE, TEXT, TIME, VERSION, Head
from sandboxes.isolation.files.copying import MAX_DEPTH, OPAQUE
from sandboxes.isolation.files.descriptors import folder as opened
from sandboxes.isolation.files.interruptible import Interrupted

TREES = frozenset({"workspace", "tmp", "upper-root", "upper-workspace"})
_HEADER_BYTES = 1 << 20  # of one entry; attributes and a list of holes fit
_ENTRIES = 1_000_000
_LOGICAL_BYTES = 1 << 50  # of a file with holes


class ArchiveRefused(SandboxError):
    """The stream is not a whole archive of a snapshot, or tries what one never does."""


def read(
    source: BinaryIO, folder: Path, *, owner: int | None, room: int, stop: threading.Event
) -> tuple[Head, int, int]:
    """Extract into the empty ``folder``; returns the head, how many files, and their bytes.

    ``owner`` gets what was the slot user's. Raises :class:`ArchiveRefused`.
    """
    try:
        with (
            tarfile.open(fileobj=source, mode="r|", tarinfo=_Entry, encoding=TEXT[0], errors=TEXT[1]) as tar,
            opened(folder) as top,
        ):
            head = _head(tar)
            reader = _Reader(tar, top, head, owner, room)
            while (entry := tar.next()) is not None:
                if stop.is_set():
                    raise Interrupted
                tar.members = []  # type: ignore[attr-defined]  # it would keep them all
                reader.extract(entry)
            reader.finish()
            return head, reader.files, reader.size
    except (tarfile.TarError, EOFError, ValueError, FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        raise ArchiveRefused(f"this is no archive of a snapshot: {error}") from error


class _Entry(tarfile.TarInfo):
    """An entry whose headers are bounded before they are read into memory."""

    def _proc_member(self, archive: Any) -> Any:
        headers = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
        if (self.type in headers and not 0 <= self.size <= _HEADER_BYTES) or self.size < 0:
            raise ArchiveRefused(f"a header of {self.size} bytes; at most {_HEADER_BYTES} are expected")
        return super()._proc_member(archive)  # type: ignore[misc]  # meant to be overridden, says its source

    def _refused(self, *_: Any) -> NoReturn:
        raise ArchiveRefused("a file with holes in a form that is not ours")

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refused


def _head(tar: tarfile.TarFile) -> Head:
    first = tar.next()
    if first is None or first.name != HEAD or not first.isreg() or first.size > _HEADER_BYTES:
        raise ArchiveRefused("this is no archive of a snapshot: its first entry is not ours")
    file = tar.extractfile(first)
    try:
        head = msgspec.json.decode(file.read() if file is not None else b"", type=Head)
    except msgspec.DecodeError as error:
        raise ArchiveRefused(f"this is no archive of a snapshot: {error}") from error
    if head.version != VERSION:
        raise ArchiveRefused(f"an archive of version {head.version}; this release reads version {VERSION}")
    if not TREES.issuperset(head.trees) or len(set(head.trees)) != len(head.trees):
        raise ArchiveRefused(f"unknown parts: {head.trees}")
    return head


class _Reader:
    def __init__(self, tar: tarfile.TarFile, top: int, head: Head, owner: int | None, room: int) -> None:
        self._tar = tar
        self._top = top
        self._head = head
        self._owner = owner
        self._room = room
        self._entries = 0
        self._folders: list[tarfile.TarInfo] = []
        self.files = 0
        self.size = 0

    def extract(self, entry: tarfile.TarInfo) -> None:
        self._entries += 1
        if self._entries > _ENTRIES:
            raise ArchiveRefused(f"more than {_ENTRIES} entries")
        with self._parent(entry.name) as (name, parent):
            if entry.isdir():
                os.mkdir(name, 0o700, dir_fd=parent)
                self._folders.append(entry)
            else:
                self._leaf(entry, name, parent)
                self.files += 1

    def finish(self) -> None:
        """Folders get their modes and times last, the inner ones first."""
        for entry in reversed(self._folders):
            with self._parent(entry.name) as (name, parent), opened(name, parent) as fd:
                self._dress(entry, fd)
        made = {entry.name for entry in self._folders}
        for tree in self._head.trees:
            if tree not in made:
                raise ArchiveRefused(f"its part {tree!r} is missing")

    def _leaf(self, entry: tarfile.TarInfo, name: str, parent: int) -> None:
        if entry.isreg():
            self._file(entry, name, parent)
        elif entry.islnk():
            with self._parent(entry.linkname) as (first, where):
                os.link(first, name, src_dir_fd=where, dst_dir_fd=parent, follow_symlinks=False)
        elif entry.issym():
            os.symlink(entry.linkname, name, dir_fd=parent)
            self._mark(entry, name, parent)
        elif entry.isfifo():
            os.mkfifo(name, entry.mode & 0o777, dir_fd=parent)
            self._mark(entry, name, parent)
        elif entry.ischr() and entry.devmajor == entry.devminor == 0 and entry.name.startswith("upper-"):
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=parent)
        else:
            raise ArchiveRefused(f"{entry.name!r} is a device or something unknown")

    def _file(self, entry: tarfile.TarInfo, name: str, parent: int) -> None:
        size, parts = _parts(entry)
        self.size += size
        self._room -= entry.size
        if self._room < 0:
            raise ArchiveRefused("more bytes than this host has room for in its snapshots")
        data = self._tar.extractfile(entry)
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
        try:
            for start, end in parts:
                position = start
                while position < end:
                    chunk = data.read(min(CHUNK, end - position)) if data is not None else b""
                    if not chunk:
                        raise ArchiveRefused(f"it ends in the middle of {entry.name!r}")
                    position += os.pwrite(fd, chunk, position)
            os.ftruncate(fd, size)
            self._dress(entry, fd)
        finally:
            os.close(fd)

    def _dress(self, entry: tarfile.TarInfo, fd: int) -> None:
        if os.geteuid() == 0:
            os.fchown(fd, *self._ids(entry))
        os.fchmod(fd, entry.mode & 0o1777)
        for key, value in entry.pax_headers.items():
            name = key.removeprefix(ATTRIBUTE)
            if key.startswith(ATTRIBUTE) and name.startswith("user.") and not name.startswith("user.overlay."):
                with contextlib.suppress(OSError):
                    os.setxattr(fd, name, value.encode("utf-8", "surrogateescape"))
        if entry.isdir() and HIDES in entry.pax_headers and entry.name.startswith("upper-"):
            for name in OPAQUE:
                with contextlib.suppress(OSError):
                    os.setxattr(fd, name, b"y")
        os.utime(fd, ns=_times(entry))

    def _mark(self, entry: tarfile.TarInfo, name: str, parent: int) -> None:
        if os.geteuid() == 0:
            os.chown(name, *self._ids(entry), dir_fd=parent, follow_symlinks=False)
        os.utime(name, ns=_times(entry), dir_fd=parent, follow_symlinks=False)

    def _ids(self, entry: tarfile.TarInfo) -> tuple[int, int]:
        if entry.pax_headers.get(OWN) == "1" and self._owner is not None:
            return self._owner, self._owner
        return _number(str(entry.uid), 1 << 31), _number(str(entry.gid), 1 << 31)

    @contextlib.contextmanager
    def _parent(self, path: str) -> Iterator[tuple[str, int]]:
        """The folder in which ``path`` stands, opened without following a link."""
        names = path.split("/")
        bad = any(name in ("", ".", "..") or "\0" in name for name in names)
        if bad or names[0] not in self._head.trees or len(names) > MAX_DEPTH + 1:
            raise ArchiveRefused(f"{path[:200]!r} leads out of the snapshot")
        with contextlib.ExitStack() as stack:
            here = self._top
            for name in names[:-1]:
                here = stack.enter_context(opened(name, here))
            yield names[-1], here


def _parts(entry: tarfile.TarInfo) -> tuple[int, list[tuple[int, int]]]:
    """Size of a file, and where in it the bytes of the entry belong."""
    if SIZE not in entry.pax_headers:
        return entry.size, [(0, entry.size)]
    size = _number(entry.pax_headers[SIZE], _LOGICAL_BYTES)
    parts: list[tuple[int, int]] = []
    last = 0
    for text in entry.pax_headers.get(DATA, "").split():
        start, end = (_number(part, size) for part in text.split("-", 1))
        if not last <= start < end:
            raise ArchiveRefused(f"the holes of {entry.name!r} overlap")
        parts.append((start, end))
        last = end
    if sum(end - start for start, end in parts) != entry.size:
        raise ArchiveRefused(f"the holes of {entry.name!r} do not fit its size")
    return size, parts


def _times(entry: tarfile.TarInfo) -> tuple[int, int]:
    time = _number(entry.pax_headers.get(TIME, "0"), 1 << 62)
    return time, time


def _number(text: str, limit: int) -> int:
    number = int(text) if len(text) < 20 else -1
    if not 0 <= number <= limit:
        raise ArchiveRefused(f"the number {text[:30]!r} is out of range")
    return number
