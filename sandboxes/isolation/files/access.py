"""Reads, writes, lists and removes a slot's files from the host, by the paths that commands inside see. Blocking."""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import secrets
import stat
from collections.abc import Callable, Iterator

from envfarm.core.errors import ToolError
from envfarm.core.sandbox import FileEntry, FileKind
from sandboxes.isolation.files.descriptors import folder as opened
from sandboxes.isolation.files.descriptors import regular_file
from sandboxes.isolation.files.paths import UNSEEN, Found, Tree, found, give, shown
from sandboxes.isolation.files.removal import remove_entry

MAX_DEPTH = 64  # levels of a listing
_CHUNK = 1 << 20


def write(tree: Tree, path: str, data: bytes) -> None:
    """Put a file in place as a whole: at no moment, and after no failure, half of it is there.

    Folders on its way are made; the mode of a file that was there is kept.
    """
    if path.endswith("/"):
        raise ToolError(f"{shown(path)}: names a folder; give the path of a file")
    with found(tree, path, make_folders=True) as end:
        _require_regular(path, end, missing=True)
        parent = _parent(path, end)
        mode = stat.S_IMODE(end.info.st_mode) & 0o777 if end.info is not None else 0o644
        with _draft(parent) as (draft, fd):
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view[:_CHUNK]) :]
            os.fchmod(fd, mode)
            give(tree.owner, draft, parent)
            os.rename(draft, end.name, src_dir_fd=parent, dst_dir_fd=parent)


@contextlib.contextmanager
def _draft(parent: int) -> Iterator[tuple[str, int]]:
    name = f".{secrets.token_hex(8)}"
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
    try:
        yield name, fd
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=parent)
        raise
    finally:
        os.close(fd)


def read(tree: Tree, path: str, limit: int) -> bytes:
    """At most ``limit`` bytes of a regular file."""
    with found(tree, path) as end:
        _require_regular(path, end)
        with regular_file(end.name, _parent(path, end)) as fd:
            if not stat.S_ISREG(os.fstat(fd).st_mode):  # another one came to its place since
                raise ToolError(f"{shown(path)}: not a regular file")
            parts, left = [], limit
            while left > 0 and (part := os.read(fd, min(left, _CHUNK))):
                parts.append(part)
                left -= len(part)
            return b"".join(parts)


def remove(tree: Tree, path: str) -> None:
    """Remove a file, a link itself, or a folder with all in it."""
    with found(tree, path, follow=False) as end:
        if end.info is None:
            raise FileNotFoundError(errno.ENOENT, "")
        if end.parent is None or _same(tree, tree.workdir, end.info):
            raise ToolError(f"{shown(path)}: this folder stays; remove what is in it")
        remove_entry(end.name, end.parent)


def make_folder(tree: Tree, path: str) -> None:
    """Have a folder, made where it is missing, that belongs to the slot's user."""
    with found(tree, f"{path}/.", make_folders=True) as end:
        if end.info is None:
            os.mkdir(end.name, 0o755, dir_fd=_parent(path, end))
        elif end.folder is None:
            raise NotADirectoryError(errno.ENOTDIR, "")
        if end.parent is not None and (end.info is None or end.info.st_uid != (tree.owner or end.info.st_uid)):
            give(tree.owner, end.name, end.parent)


def listing(tree: Tree, path: str, depth: int, limit: int) -> list[FileEntry]:
    """Entries of a folder, name by name in order, each folder before what is in it; ``depth`` is at most 64.

    Links are shown, not followed. Names that are not UTF-8 hold surrogate escapes, as ``os.fsdecode`` makes them.
    """
    entries: list[FileEntry] = []
    with found(tree, path) as end:
        if end.info is None:
            raise FileNotFoundError(errno.ENOENT, "")
        if end.folder is None:
            raise ToolError(f"{shown(path)}: is a file; give the path of a folder")
        is_root = end.parent is None and end.name == "/"
        with opened(".", end.folder) as folder:
            _list_into(entries, tree, folder, "", max(1, min(depth, MAX_DEPTH)), limit, is_root=is_root)
    return entries


def _list_into(
    entries: list[FileEntry], tree: Tree, folder: int, prefix: str, depth: int, limit: int, *, is_root: bool = False
) -> None:
    names = heapq.nsmallest(max(0, limit - len(entries)), _names(tree, folder, is_root=is_root), key=os.fsencode)
    for name in names:
        if len(entries) >= limit:
            return
        where = (tree.places[name], None) if is_root and name in tree.places else (name, folder)
        try:
            info = os.stat(where[0], dir_fd=where[1], follow_symlinks=False)
        except FileNotFoundError:
            continue
        entry = _entry(prefix + name, info)
        entries.append(entry)
        if entry.kind is FileKind.FOLDER and depth > 1 and not (is_root and name in UNSEEN):
            with contextlib.suppress(PermissionError, FileNotFoundError, NotADirectoryError), opened(*where) as inner:
                _list_into(entries, tree, inner, f"{entry.path}/", depth - 1, limit)


def _names(tree: Tree, folder: int, *, is_root: bool) -> Iterator[str]:
    with os.scandir(folder) as scan:
        for entry in scan:
            if not (is_root and entry.name in tree.places):
                yield entry.name
    if is_root:
        yield from tree.places


_KINDS: tuple[tuple[Callable[[int], bool], FileKind], ...] = (
    (stat.S_ISREG, FileKind.FILE),
    (stat.S_ISDIR, FileKind.FOLDER),
    (stat.S_ISLNK, FileKind.LINK),
)


def _entry(path: str, info: os.stat_result) -> FileEntry:
    kind = next((kind for test, kind in _KINDS if test(info.st_mode)), FileKind.OTHER)
    return FileEntry(path=path, kind=kind, size=0 if kind is FileKind.FOLDER else info.st_size)


def _require_regular(path: str, end: Found, *, missing: bool = False) -> None:
    if end.info is None:
        if not missing:
            raise FileNotFoundError(errno.ENOENT, "")
    elif end.folder is not None:
        raise IsADirectoryError(errno.EISDIR, "")
    elif not stat.S_ISREG(end.info.st_mode):
        raise ToolError(f"{shown(path)}: not a regular file")


def _parent(path: str, end: Found) -> int:
    if end.parent is None:
        raise ToolError(f"{shown(path)}: is a folder")
    return end.parent


def _same(tree: Tree, path: str, info: os.stat_result) -> bool:
    try:
        with found(tree, path) as end:
            return end.info is not None and os.path.samestat(end.info, info)
    except ToolError:
        return False
