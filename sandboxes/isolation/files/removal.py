"""Removes trees that model-written code made: closed to us, changing meanwhile, and of any depth. Blocking."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from sandboxes.isolation.files.descriptors import by_force
from sandboxes.isolation.files.descriptors import folder as opened

_DEEP = 48  # levels; what lies deeper is moved up, so that neither the stack nor the descriptors run out
_TRIES = 5  # while somebody keeps making files


def remove_entry(name: str, parent: int) -> None:
    """Remove an entry of the open folder ``parent``, whatever it is and holds. Raises ``OSError``."""
    try:
        os.unlink(name, dir_fd=parent)
    except IsADirectoryError:
        _until_removed(name, parent, _empty_whole)


def empty_folder(path: Path) -> None:
    """Remove what is in a folder. Raises ``OSError``."""
    with opened(path) as folder:
        _empty_whole(folder)


def _empty_whole(top: int) -> None:
    moved: list[str] = []
    _empty(top, top, moved, 1)
    while moved:
        _remove_folder(moved.pop(), top, top, moved, 1)


def _empty(folder: int, top: int, moved: list[str], depth: int) -> None:
    with os.scandir(folder) as scan:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in scan]
    for name, is_folder in entries:
        with contextlib.suppress(FileNotFoundError):
            if not is_folder:
                os.unlink(name, dir_fd=folder)
            elif depth < _DEEP:
                _remove_folder(name, folder, top, moved, depth)
            else:
                moved.append(f".{secrets.token_hex(8)}")
                os.rename(name, moved[-1], src_dir_fd=folder, dst_dir_fd=top)


def _remove_folder(name: str, parent: int, top: int, moved: list[str], depth: int) -> None:
    _until_removed(name, parent, lambda folder: _empty(folder, top, moved, depth + 1))


def _until_removed(name: str, parent: int, empty: Callable[[int], None]) -> None:
    for tries_left in reversed(range(_TRIES)):
        with by_force(name, parent, is_folder=True) as folder:
            empty(folder)
        try:
            os.rmdir(name, dir_fd=parent)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or not tries_left:
                raise
        else:
            return
