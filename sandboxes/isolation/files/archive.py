"""How a snapshot looks as a tar stream, and writing it. Reading is in :mod:`sandboxes.isolation.files.archive_reader`.

The archive is in pax format. What tar has no place for stands in headers of our own: whether an entry is the slot
user's, times in nanoseconds, where a file with holes has data, which folders hide the ones beneath them. Blocking.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec

from sandboxes.isolation.files.copying import OPAQUE, attributes, extents
from sandboxes.isolation.files.descriptors import by_force
from sandboxes.isolation.files.descriptors import folder as opened
from sandboxes.isolation.files.interruptible import Interrupted

VERSION = 1
HEAD = "envfarm.json"
OWN, TIME, DATA, SIZE, HIDES = (f"ENVFARM.{name}" for name in ("own", "mtime_ns", "data", "size", "hides"))
ATTRIBUTE = "SCHILY.xattr."
TEXT = ("utf-8", "surrogateescape")  # so that names and values of any bytes pass
CHUNK = 1 << 20


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """First entry of an archive."""

    image: str
    trees: list[str]
    version: int = VERSION


def write(folder: Path, head: Head, target: BinaryIO, *, owner: int | None, stop: threading.Event) -> None:
    """Write the trees in ``folder``."""
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT, encoding=TEXT[0], errors=TEXT[1]) as tar:
        data = msgspec.json.encode(head)
        info = tarfile.TarInfo(HEAD)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
        with opened(folder) as parent:
            for tree in head.trees:
                _Writer(tar, owner, stop).folder(tree, parent, tree)


class _Writer:
    def __init__(self, tar: tarfile.TarFile, owner: int | None, stop: threading.Event) -> None:
        self._tar = tar
        self._owner = os.geteuid() if owner is None else owner
        self._stop = stop
        self._linked: dict[int, str] = {}

    def folder(self, name: str, parent: int, path: str) -> None:
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
        with by_force(name, parent, is_folder=True) as here:
            self._tar.addfile(self._member(path, info, tarfile.DIRTYPE, here))
            with os.scandir(here) as scan:
                names = sorted((entry.name for entry in scan), key=os.fsencode)
            for inner in names:
                self._entry(inner, here, f"{path}/{inner}")

    def _entry(self, name: str, parent: int, path: str) -> None:
        if self._stop.is_set():
            raise Interrupted
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
        kind = stat.S_IFMT(info.st_mode)
        if kind == stat.S_IFDIR:
            self.folder(name, parent, path)
        elif info.st_nlink > 1 and info.st_ino in self._linked:
            member = self._member(path, info, tarfile.LNKTYPE)
            member.linkname = self._linked[info.st_ino]
            self._tar.addfile(member)
        else:
            if info.st_nlink > 1:
                self._linked[info.st_ino] = path
            self._leaf(name, parent, path, info, kind)

    def _leaf(self, name: str, parent: int, path: str, info: os.stat_result, kind: int) -> None:
        if kind == stat.S_IFREG:
            with by_force(name, parent, is_folder=False) as here:
                self._file(path, info, here)
        elif kind == stat.S_IFLNK:
            member = self._member(path, info, tarfile.SYMTYPE)
            member.linkname = os.readlink(name, dir_fd=parent)
            self._tar.addfile(member)
        elif kind == stat.S_IFIFO:
            self._tar.addfile(self._member(path, info, tarfile.FIFOTYPE))
        elif kind == stat.S_IFCHR and info.st_rdev == 0:
            self._tar.addfile(self._member(path, info, tarfile.CHRTYPE))

    def _file(self, path: str, info: os.stat_result, here: int) -> None:
        member = self._member(path, info, tarfile.REGTYPE, here)
        parts = list(extents(here, info.st_size))
        member.size = sum(end - start for start, end in parts)
        if member.size < info.st_size:
            data = " ".join(f"{start}-{end}" for start, end in parts)
            member.pax_headers = {**member.pax_headers, SIZE: str(info.st_size), DATA: data}
        self._tar.addfile(member, _Extents(here, parts, self._stop))

    def _member(self, path: str, info: os.stat_result, kind: bytes, fd: int | None = None) -> tarfile.TarInfo:
        member = tarfile.TarInfo(path)
        member.type = kind
        member.mode = stat.S_IMODE(info.st_mode)
        member.uid, member.gid = info.st_uid, info.st_gid
        member.mtime = info.st_mtime_ns // 1_000_000_000
        headers = {OWN: "1" if info.st_uid == self._owner else "0", TIME: str(info.st_mtime_ns)}
        for name in attributes(fd) if fd is not None else ():
            value = os.getxattr(fd or 0, name).decode("utf-8", "surrogateescape")
            headers.update({HIDES: "1"} if name in OPAQUE else {ATTRIBUTE + name: value})
        member.pax_headers = headers
        return member


class _Extents(io.RawIOBase):
    """Reads the parts of a file one after the other."""

    def __init__(self, fd: int, parts: list[tuple[int, int]], stop: threading.Event) -> None:
        super().__init__()
        self._fd = fd
        self._parts = parts[::-1]
        self._stop = stop

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if self._stop.is_set():
            raise Interrupted
        found = bytearray()
        while self._parts and len(found) < size:
            start, end = self._parts.pop()
            data = os.pread(self._fd, min(size - len(found), end - start), start)
            if data and start + len(data) < end:
                self._parts.append((start + len(data), end))
            found += data
        return bytes(found)
