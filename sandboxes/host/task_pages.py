"""Tasks of an environment by position, from one iterator per split that is kept where it stands."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

from envfarm.core.environment import Environment
from envfarm.core.errors import ConfigError, EnvironmentCodeError
from envfarm.core.task import SPLITS, TASKS_PER_PAGE, Task
from sandboxes.host.environments import Loaded
from sandboxes.host.instance import ask
from sandboxes.host.runner import Job, Runner, Steps


class TaskPages:
    """Pages of every environment's tasks. Reading on is cheap, going back starts again; endless splits are fine."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._cursors: dict[tuple[str, str], _Cursor] = {}

    async def page(self, loaded: Loaded, split: str, offset: int, limit: int) -> list[Task]:
        """Tasks ``offset`` up to ``offset + limit``; fewer: the split ends there."""
        if split not in SPLITS:
            raise ConfigError(f"no split named {split!r} (there is: {', '.join(SPLITS)})")
        if not 1 <= limit <= TASKS_PER_PAGE:
            raise ConfigError(f"limit is {limit}; a page has 1 to {TASKS_PER_PAGE} tasks")
        cursor = self._cursors.setdefault((loaded.name, split), _Cursor(loaded, split))
        async with cursor.lock:
            future: asyncio.Future[list[Task]] = asyncio.get_running_loop().create_future()
            self._runner.submit(_job(cursor, offset, limit, future))
            try:
                return await future
            except BaseException:
                self._cursors.pop((loaded.name, split), None)  # who knows where it stands now
                raise


def _job(cursor: _Cursor, offset: int, limit: int, future: asyncio.Future[list[Task]]) -> Job:
    given_up = False

    def run(job: Job) -> Steps:
        if given_up:
            raise EnvironmentCodeError(f"environment {cursor.loaded.name!r}: tasks({cursor.split!r}) hangs")
        what = f"tasks({cursor.split!r})"
        seconds = cursor.loaded.limits.reset_seconds
        return (yield from ask(job, cursor.loaded.name, what, cursor.read, seconds, offset, limit))

    def done(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def abandoned(_: object) -> None:
        nonlocal given_up
        given_up = True

    return Job(run, done, abandoned)


class _Cursor:
    """The iterator of one split, and the page it last gave (a caller that lost the answer asks again)."""

    def __init__(self, loaded: Loaded, split: str) -> None:
        self.loaded = loaded
        self.split = split
        self.lock = asyncio.Lock()
        self._environment: Environment | None = None
        self._iterator: Iterator[Task] = iter(())
        self._position = -1
        self._last: tuple[int, int, list[Task]] | None = None

    def read(self, offset: int, limit: int) -> list[Task]:
        """Runs on a runner thread."""
        if self._last is not None and self._last[:2] == (offset, limit):
            return self._last[2]
        if self._environment is None:
            self._environment = self.loaded.cls()
        if self._position < 0 or offset < self._position:
            self._iterator = iter(self._environment.tasks(self.split))
            self._position = 0
        for _ in itertools.islice(self._iterator, offset - self._position):
            pass
        tasks = list(itertools.islice(self._iterator, limit))
        for task in tasks:
            if not isinstance(task, Task):
                raise TypeError(f"gave {type(task).__name__}, expected Task")
        self._position = offset + len(tasks)
        self._last = (offset, limit, tasks)
        return tasks
