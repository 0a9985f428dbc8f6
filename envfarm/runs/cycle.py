"""Where tickets get their tasks from: pages of an environment's split, fetched ahead, kept within bounds."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from envfarm.core.errors import ConfigError, DeadlineExceeded
from envfarm.core.task import Task

PAGE = 64
_KEEP = 32
_SECONDS = 30.0

Split = tuple[str, str]  # environment, split


class TaskSource(Protocol):
    """Gives tasks by position. The gateway asks a host; tests and tools may have a list."""

    async def tasks(self, environment: str, split: str, offset: int, limit: int) -> Sequence[Task]:
        """Tasks from ``offset`` on, at most ``limit``; fewer only where the split ends. Raises ``FarmError``."""
        ...


class TaskCycle:
    """Tasks by index, for ever: a finite split starts again from its beginning (index modulo length).

    At most 32 pages of 64 tasks are kept, those used last.
    """

    def __init__(self, source: TaskSource) -> None:
        self._source = source
        self._pages: OrderedDict[tuple[Split, int], Sequence[Task]] = OrderedDict()
        self._lengths: dict[Split, int] = {}
        self._fetching = asyncio.Lock()

    async def get(self, environment: str, split: str, indices: Iterable[int]) -> list[Task]:
        """The tasks at ``indices``. Raises ``ConfigError`` for an empty split and whatever the source raises."""
        return [await self._task((environment, split), index) for index in indices]

    async def _task(self, split: Split, index: int) -> Task:
        if split in self._lengths:
            index %= self._lengths[split]
        page = await self._page(split, index // PAGE)
        if index % PAGE < len(page):
            return page[index % PAGE]
        length = self._lengths[split] = await self._length(split, index // PAGE)
        index %= length
        return (await self._page(split, index // PAGE))[index % PAGE]

    async def _page(self, split: Split, number: int) -> Sequence[Task]:
        key = (split, number)
        if key not in self._pages:
            async with self._fetching:  # those who wait for the same page find it when their turn comes
                if key not in self._pages:
                    self._pages[key] = await self._fetch(split, number)
                    while len(self._pages) > _KEEP:
                        self._pages.popitem(last=False)
        self._pages.move_to_end(key)
        return self._pages[key]

    async def _fetch(self, split: Split, number: int) -> Sequence[Task]:
        try:
            async with asyncio.timeout(_SECONDS):
                page = await self._source.tasks(*split, number * PAGE, PAGE)
        except TimeoutError:
            raise DeadlineExceeded(
                f"environment {split[0]!r} did not list its {split[1]} tasks within {_SECONDS:g} s"
            ) from None
        if 0 < len(page) < PAGE:
            self._lengths[split] = number * PAGE + len(page)
        return tuple(page)

    async def _length(self, split: Split, short: int) -> int:
        """Length of a split whose page ``short`` is not full: bisect for the last page that holds anything."""
        first, beyond = -1, short + 1  # page `first` is full (or there is none), `beyond` is empty
        while beyond - first > 1:
            middle = (first + beyond) // 2
            page = await self._page(split, middle)
            if len(page) == PAGE:
                first = middle
            elif page:
                return middle * PAGE + len(page)
            else:
                beyond = middle
        if first < 0:
            raise ConfigError(f"environment {split[0]!r} has no tasks in split {split[1]!r}; expected at least one")
        return (first + 1) * PAGE
