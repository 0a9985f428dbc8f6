"""Works for every run of a gateway, as runs come and go: what a worker does that was not told which one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from envfarm.core.errors import DeadlineExceeded, FarmError, Unavailable
from envfarm.core.run import WORKERS_LABEL, Run, RunState
from envfarm.rollout.worker import Worker

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
AWAY_SECONDS = 120.0


class Registry(Protocol):
    """Lists runs: :class:`envfarm.wire.run_client.RunClient`."""

    async def list(self) -> list[Run]:
        """All runs, newest first."""
        ...


def wanted(run: Run) -> bool:
    """Whether any worker may work for ``run``: it is not over, and whoever made it does not bring workers along."""
    return run.state is not RunState.STOPPED and run.settings.labels.get(WORKERS_LABEL) != "own"


class EveryRun:
    """One :class:`Worker` per run, made by ``make`` from its id, until :meth:`drain` is called.

    A run whose worker fails is left alone from then on, and said so: the others go on.
    """

    def __init__(self, registry: Registry, make: Callable[[str], Worker]) -> None:
        self._registry = registry
        self._make = make
        self._workers: dict[str, Worker] = {}
        self._seen: set[str] = set()
        self._draining = asyncio.Event()

    def drain(self) -> None:
        """Start no more groups; see :meth:`Worker.drain`."""
        self._draining.set()
        for worker in self._workers.values():
            worker.drain()

    async def run(self) -> None:
        """Work. Raises :class:`Unavailable` when the gateway stays away."""
        async with asyncio.TaskGroup() as tasks:
            while not self._draining.is_set():
                for run in await self._runs():
                    if run.id not in self._seen and wanted(run):
                        self._seen.add(run.id)
                        tasks.create_task(self._work(run.id), name=f"run {run.id}")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._draining.wait()

    async def _runs(self) -> list[Run]:
        try:
            async with asyncio.timeout(AWAY_SECONDS):
                while True:
                    try:
                        return await self._registry.list()
                    except (Unavailable, DeadlineExceeded) as error:
                        log.warning("runs cannot be listed: %s", error)
                        await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            raise Unavailable(f"the gateway does not answer for {AWAY_SECONDS:g} s") from None

    async def _work(self, run_id: str) -> None:
        worker = self._workers[run_id] = self._make(run_id)
        if self._draining.is_set():
            worker.drain()
        log.info("works for run %s", run_id)
        try:
            await worker.run()
        except* FarmError as group:
            why = "; ".join(str(error) for error in _leaves(group))
            log.error("run %s is left alone: %s", run_id, why)  # noqa: TRY400 - the sentence is enough
        finally:
            self._workers.pop(run_id, None)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
