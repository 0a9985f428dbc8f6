"""The source files of environments, watched by their times: for hosts that start anew when the code changes."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

_MOST_FILES = 20_000
_Seen = dict[str, tuple[int, int]]


class Sources:
    """Python files that ``environments`` are made of, as they were when this was made. Methods do file I/O.

    Of ``file.py:Class`` the whole folder of the file is watched, of a module the package that it lies in.
    """

    def __init__(self, environments: Iterable[str]) -> None:
        self._places = {place for name in environments for place in _places(name)}
        self._first = self._last = self._look()

    def changed(self) -> bool:
        """Whether they differ from what they were, and have stopped changing since the last call."""
        before, self._last = self._last, self._look()
        return self._last != self._first and self._last == before

    def _look(self) -> _Seen:
        seen: _Seen = {}
        for place in self._places:
            for file in _python_files(place):
                if len(seen) >= _MOST_FILES:
                    return seen
                try:
                    facts = file.stat()
                except OSError:
                    continue  # removed meanwhile: its absence is the change
                seen[str(file)] = (facts.st_mtime_ns, facts.st_size)
        return seen


def _python_files(place: Path) -> Iterator[Path]:
    if not place.is_dir():
        yield place
        return
    for folder, folders, files in os.walk(place):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _places(name: str) -> list[Path]:
    source, colon, _ = name.rpartition(":")
    if colon and source.endswith(".py"):
        return [Path(source).resolve().parent]
    if not colon:
        registered = entry_points(group="envfarm.environments", name=name.partition("/")[0])
        return [place for point in registered for place in _module_places(point.module)]
    return _module_places(source)


def _module_places(module: str) -> list[Path]:
    """Of the top-level package: finding anything below it would run its code."""
    try:
        found = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return []
    if found is None:
        return []
    if found.submodule_search_locations:
        return [Path(place) for place in found.submodule_search_locations]
    return [Path(found.origin)] if found.origin else []
