"""Finds files by the paths that commands inside see, from the host, while model-written code may be at work on them.

The files of a slot are several folders of the host that commands see as one tree, so that no single call of the kernel
resolves a path as it looks from inside (``openat2`` with ``RESOLVE_IN_ROOT`` knows one root only, and is refused in
many containers). A path is therefore walked one name at a time. No step follows a link: links are read and their text
is walked in turn, from the root *inside* when it is absolute. ``..`` goes back to the folder that the walk came from.
So what is swapped meanwhile can lead the walk elsewhere inside, and never out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import msgspec

from envfarm.core.errors import ToolError

MAX_LINKS = 40  # as the kernel
UNSEEN = frozenset({"dev", "proc", "sys"})  # made anew for each command
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_SAYINGS = {
    errno.ENOENT: "no such file or folder",
    errno.ENOTDIR: "a part of the path is not a folder",
    errno.EISDIR: "is a folder",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ELOOP: "too many links",
    errno.EROFS: "is read-only",
    errno.ENOSPC: "no room left: the sandbox's disk is full; remove files that are not needed",
    errno.EDQUOT: "no room left: the sandbox's disk is full; remove files that are not needed",
    errno.EXDEV: "cannot be moved between folders of the image",
}


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """What commands see. ``root``: folder on the host that is / inside; ``places``: names in it that lie elsewhere.

    Without a root, commands see the host's own system there, which is none of a slot's files.
    """

    root: Path | None
    places: Mapping[str, Path]
    workdir: str
    owner: int | None  # of what is made; none: whoever this process is


class Found:
    """Where a path leads: an entry ``name`` of the open folder ``parent``, which may not exist (``info`` is None).

    ``parent`` is None for the root and for what is mounted in it; ``folder`` is open where the path leads to a folder.
    """

    def __init__(self, parent: int | None, name: str, folder: int | None, info: os.stat_result | None) -> None:
        self.parent = parent
        self.name = name
        self.folder = folder
        self.info = info


@contextlib.contextmanager
def found(tree: Tree, path: str, *, follow: bool = True, make_folders: bool = False) -> Iterator[Found]:
    """Walk ``path``. ``follow``: a link at its end too. ``make_folders``: on the way to an end that may not exist.

    Raises :class:`ToolError`, also in place of an ``OSError`` of the block.
    """
    if not path or "\0" in path:
        raise ToolError(f"{path!r}: not a path")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise ToolError(f"{path!r}: not a path") from None
    try:
        with _Walk(tree, make_folders=make_folders) as walk:
            yield walk.to(path, follow=follow)
    except OSError as error:
        raise ToolError(f"{shown(path)}: {said(error)}") from None


def said(error: OSError) -> str:
    """What went wrong, for the model."""
    return _SAYINGS.get(error.errno or 0) or error.strerror or str(error)


def shown(path: str) -> str:
    """A path with what is not UTF-8 in it made visible."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def names(tree: Tree, path: str) -> list[str]:
    """The names on the way to ``path``, from the root."""
    return [name for name in (path if path.startswith("/") else f"{tree.workdir}/{path}").split("/") if name]


class _Walk:
    """Folders that are open from the root to here."""

    def __init__(self, tree: Tree, *, make_folders: bool) -> None:
        self._tree = tree
        self._make_folders = make_folders
        self._open: list[int] = []
        self._names: list[str] = []  # of the open folders but the root
        self._links = 0

    def __enter__(self) -> _Walk:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._up(0)
        for fd in self._open:
            os.close(fd)

    def to(self, path: str, *, follow: bool) -> Found:
        todo = deque(names(self._tree, path))
        if self._tree.root is not None:
            self._open.append(os.open(self._tree.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        while todo:
            name = todo.popleft()
            if name == ".":
                continue
            if name == "..":
                self._up(max(0, len(self._names) - 1))
                continue
            last = not any(part != "." for part in todo)
            end = self._step(name, todo, path, last=last, follow=follow)
            if end is not None:
                return end
        return self._here(path)

    def _step(self, name: str, todo: deque[str], path: str, *, last: bool, follow: bool) -> Found | None:
        """One name further; returns where it ends when that is no folder."""
        entry = self._look(name, path)
        if entry is None and self._make_folders and not last:
            entry = self._made(name)
        if entry is None:
            if not last:
                raise FileNotFoundError(errno.ENOENT, "")
            return Found(self._parent(), name, None, None)
        try:
            info = os.fstat(entry)
            if stat.S_ISDIR(info.st_mode):
                self._open.append(entry)
                self._names.append(name)
                entry = -1
                return None
            if stat.S_ISLNK(info.st_mode) and (follow or not last):
                self._follow(entry, todo)
                return None
        finally:
            if entry >= 0:
                os.close(entry)
        if not last:
            raise NotADirectoryError(errno.ENOTDIR, "")
        return Found(self._parent(), name, None, info)

    def _look(self, name: str, path: str) -> int | None:
        """Descriptor of an entry of the folder here that allows to look at it, whatever it is."""
        place = None
        if not self._names:
            if name in UNSEEN:
                raise ToolError(f"{shown(path)}: /{name} is the sandbox's own and has no files to keep")
            place = self._tree.places.get(name)
            if place is None and self._tree.root is None:
                raise ToolError(f"{shown(path)}: only what is in /workspace or /tmp can be reached")
        try:
            return os.open(place or name, _LOOK, dir_fd=None if place is not None else self._open[-1])
        except FileNotFoundError:
            return None

    def _follow(self, link: int, todo: deque[str]) -> None:
        self._links += 1
        if self._links > MAX_LINKS:
            raise OSError(errno.ELOOP, "")
        target = os.readlink("", dir_fd=link)
        if target.startswith("/"):
            self._up(0)
        todo.extendleft(reversed([name for name in target.split("/") if name]))

    def _made(self, name: str) -> int:
        parent = self._parent()
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=parent)
            give(self._tree.owner, name, parent)
        return os.open(name, _LOOK, dir_fd=parent)

    def _parent(self) -> int:
        if not self._open:
            raise FileNotFoundError(errno.ENOENT, "")  # a place of the slot's that is not there
        return self._open[-1]

    def _up(self, depth: int) -> None:
        """Back to the folder that is ``depth`` names below the root."""
        while len(self._names) > depth:
            self._names.pop()
            os.close(self._open.pop())

    def _here(self, path: str) -> Found:
        if not self._open:
            raise ToolError(f"{shown(path)}: only what is in /workspace or /tmp can be reached")
        folder = self._open[-1]
        fixed = len(self._names) == 0 or (len(self._names) == 1 and self._names[0] in self._tree.places)
        parent = None if fixed else self._open[-2]
        return Found(parent, self._names[-1] if self._names else "/", folder, os.fstat(folder))


def give(owner: int | None, name: str, parent: int) -> None:
    """Make an entry of the open folder ``parent`` the slot's user's."""
    if owner is not None:
        os.chown(name, owner, owner, dir_fd=parent, follow_symlinks=False)
