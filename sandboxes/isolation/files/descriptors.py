"""Opens entries of folders that model-written code may be changing: by their folder, and never through a link."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # non-blocking: a named pipe must not hold us


@contextlib.contextmanager
def folder(name: str | os.PathLike[str], parent: int | None = None) -> Iterator[int]:
    """A folder opened to be read."""
    fd = os.open(name, FOLDER, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def regular_file(name: str, parent: int) -> Iterator[int]:
    """An entry opened to be read; ``OSError`` for links. Whether it is a regular file is for the caller to see."""
    fd = os.open(name, _FILE | os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def by_force(name: str, parent: int, *, is_folder: bool) -> Iterator[int]:
    """A folder or regular file opened to be read, a folder to be changed as well, although its owner has closed it.

    Its mode is afterwards what it was.
    """
    wanted = stat.S_IRWXU if is_folder else stat.S_IRUSR
    seen = os.open(name, LOOK | (os.O_DIRECTORY if is_folder else 0), dir_fd=parent)
    try:
        info = os.fstat(seen)
        here = f"/proc/self/fd/{seen}"  # what is open, wherever its name leads by now
        mode = stat.S_IMODE(info.st_mode)
        closed = info.st_uid == os.geteuid() != 0 and mode & wanted != wanted and not stat.S_ISLNK(info.st_mode)
        if closed:
            os.chmod(here, mode | wanted)  # noqa: PTH101 - what is open, not a path
        try:
            with folder(".", seen) if is_folder else regular_file(name, parent) as fd:
                yield fd
        finally:
            if closed:
                os.chmod(here, mode)  # noqa: PTH101 - what is open, not a path
    finally:
        os.close(seen)
