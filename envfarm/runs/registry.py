"""The run registry: what runs there are, what they do, who may start which group, and their metrics.

It lives in the same file as the trajectory log, because the window of a run is what was issued minus what a consumer
has committed there.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from envfarm.core.deadline import Deadline
from envfarm.core.errors import ConfigError, FarmError
from envfarm.core.ids import derived_seed, new_id
from envfarm.core.run import GroupTicket, MetricPoint, Run, RunSettings, RunState
from envfarm.runs import metrics, tickets
from envfarm.runs.checks import check_name, check_settings
from envfarm.runs.cycle import TaskCycle, TaskSource
from envfarm.storage.database import Database

Tickets = list[GroupTicket]
Points = list[MetricPoint]

LEASE_SECONDS = 600.0
SILENCE_SECONDS = 60.0
_TICKETS_AT_ONCE = 1_024
_HISTORY_PAGE = 2_000
_WATCH_SECONDS = 60.0
_KEEP_TICKET_SECONDS = 600.0
_COLUMNS = "id, name, settings, state, cause, policy_version, groups_issued, created_at"


class RunRegistry:
    """Runs in one SQLite file. Used from one event loop; several processes may open the same file."""

    def __init__(
        self,
        path: Path | str,
        tasks: TaskSource,
        *,
        lease_seconds: float = LEASE_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open or create ``path``. Does file I/O. Raises ``LogError`` or ``ConfigError``.

        ``tasks`` gives tickets their tasks. A ticket is given to another worker when its group is not whole and
        neither a record of it nor its worker was seen for ``lease_seconds`` of ``clock`` (seconds since the epoch),
        or for ``silence_seconds`` if that worker has been reporting metrics.
        """
        self._database = Database.shared(Path(path))
        self._tasks = TaskCycle(tasks)
        self._clock = clock
        self._patience = tickets.Patience(lease=lease_seconds, silence=silence_seconds, since=clock())

    async def create(self, name: str, settings: RunSettings, request_id: str = "") -> Run:
        """A new run, running; the same one again for a ``request_id`` that was seen. Raises ``ConfigError``."""
        check_name(name)
        check_settings(settings)
        now = self._clock()
        return await self._database.write(lambda c: _create(c, name, settings, request_id or None, now))

    async def get(self, run_id: str) -> Run:
        """The run as it is now. Raises ``ConfigError`` when there is none."""
        return await self._database.read(lambda c: _get(c, run_id))

    async def list(self) -> list[Run]:
        """All runs, newest first."""
        query = f"SELECT {_COLUMNS} FROM runs ORDER BY number DESC"  # noqa: S608 - constants
        return await self._database.read(lambda c: [_run(row) for row in c.execute(query)])

    async def set_state(self, run_id: str, state: RunState, cause: str) -> Run:
        """Pause, resume or stop; ``cause`` says who or what wants it. A stopped run stays stopped (``ConfigError``)."""
        return await self._database.write(lambda c: _set_state(c, run_id, state, cause))

    async def publish_version(self, run_id: str, version: int) -> None:
        """The trainer has published ``version``. Raises ``ConfigError`` when the run is at a later one already."""
        await self._database.write(lambda c: _publish(c, run_id, version))

    async def acquire(
        self, run_id: str, worker: str, limit: int, timeout: float, request_id: str = ""
    ) -> tuple[Tickets, Run, str]:
        """Tickets for the next groups: (tickets, the run now, what is waited for when there are none).

        Waits up to ``timeout`` seconds while the run is paused or its window is full; a stopped run answers at once.
        A repeated ``request_id`` gets the same tickets. Raises ``ConfigError`` and what the task source raises.
        """
        if not worker or limit < 1:
            raise ConfigError(f"acquire needs a worker's name and a limit of at least 1, got {worker!r} and {limit}")
        limit = min(limit, _TICKETS_AT_ONCE)
        deadline = Deadline.after(timeout)
        await self._hear(run_id, worker)
        while True:
            seen = self._database.version
            run, outlook = await self._look(run_id, limit, request_id)
            if outlook.any:
                found = await self._issue(run, worker, limit, request_id)
                if found:
                    return found, await self.get(run_id), ""
            if run.state is RunState.STOPPED or deadline.expired():
                return [], run, outlook.waiting_for
            await self._database.changed(seen, timeout=min(deadline.remaining(), outlook.look_again_s))

    async def report(self, run_id: str, points: Sequence[MetricPoint], worker: str = "") -> None:
        """Add points to series; renews the leases of ``worker``, the name under which it acquires.

        Raises ``ConfigError``.
        """
        metrics.check(points)
        now = self._clock()

        def store(connection: sqlite3.Connection) -> None:
            _get(connection, run_id)
            metrics.store(connection, run_id, points)
            if worker:
                tickets.hear(connection, run_id, worker, now, reporting=True)

        await self._database.write(store, size=128 * len(points))

    async def metrics(self, run_id: str, name: str | None = None, limit: int = 100_000) -> Points:
        """Stored points of one series name, or of all, in the order of arrival."""
        points, _ = await self._database.read(lambda c: metrics.load(c, run_id, after=0, limit=limit, name=name))
        return points

    async def watch(self, run_id: str, history: bool) -> AsyncGenerator[tuple[Run, Points], None]:
        """The run now, and again with new points whenever something changes; ``history`` begins with all stored points.

        Raises ``ConfigError`` when there is no such run.
        """
        after = 0 if history else await self._database.read(metrics.last)
        shown: Run | None = None
        while True:
            seen = self._database.version
            run, points, after = await self._database.read(partial(_news, run_id=run_id, after=after))
            if points or run != shown:
                shown = run
                yield run, points
            if len(points) < _HISTORY_PAGE:
                await self._database.changed(seen, timeout=_WATCH_SECONDS)

    async def close(self) -> None:
        """Write what waits and close."""
        await self._database.close()

    async def _hear(self, run_id: str, worker: str) -> None:
        """Renew the worker's leases, unless that was done a moment ago."""
        now = self._clock()
        heard = await self._database.read(lambda c: tickets.oldest_heard(c, run_id, worker))
        if heard is not None and now - heard > self._patience.lease / 100:
            await self._database.write(lambda c: tickets.hear(c, run_id, worker, now))

    async def _look(self, run_id: str, limit: int, request_id: str) -> tuple[Run, tickets.Outlook]:
        now = self._clock()

        def look(connection: sqlite3.Connection) -> tuple[Run, tickets.Outlook]:
            run = _get(connection, run_id)
            return run, tickets.look(
                connection, run, request_id=request_id, limit=limit, patience=self._patience, now=now
            )

        return await self._database.read(look)

    async def _issue(self, run: Run, worker: str, limit: int, request_id: str) -> Tickets:
        """Issue tickets with their tasks. Tasks are fetched first: a group is not issued that could not be started."""
        settings = run.settings
        coming = range(run.groups_issued, run.groups_issued + limit)
        await self._tasks.get(settings.environment, settings.split, coming)
        now = self._clock()

        def issue(connection: sqlite3.Connection) -> Sequence[int]:
            present = _get(connection, run.id)
            tickets.forget_whole(connection, present, now - _KEEP_TICKET_SECONDS)
            return tickets.issue(
                connection, present, worker=worker, request_id=request_id, limit=limit, patience=self._patience, now=now
            )

        numbers = await self._database.write(issue)
        try:
            tasks = await self._tasks.get(settings.environment, settings.split, numbers)
        except FarmError:
            await self._database.write(lambda c: tickets.take_back(c, run.id, numbers))
            raise
        return [
            GroupTicket(
                group_id=tickets.group_id(run.id, number),
                run_id=run.id,
                index=number,
                task=task,
                seed=derived_seed(settings.seed, settings.environment, settings.split, number),
                group_size=settings.group_size,
            )
            for number, task in zip(numbers, tasks, strict=True)
        ]


def _create(
    connection: sqlite3.Connection, name: str, settings: RunSettings, request_id: str | None, now: float
) -> Run:
    found = connection.execute("SELECT id FROM runs WHERE request_id = ?", (request_id,)).fetchone()
    if found:
        return _get(connection, found[0])
    run = Run(id=new_id("run"), name=name, settings=settings, state=RunState.RUNNING, created_at=now)
    connection.execute(
        "INSERT INTO runs (id, request_id, name, settings, state, cause, policy_version, groups_issued, created_at)"
        " VALUES (?, ?, ?, ?, ?, '', 0, 0, ?)",
        (run.id, request_id, name, msgspec.json.encode(settings), run.state.value, now),
    )
    return run


def _get(connection: sqlite3.Connection, run_id: str) -> Run:
    row = connection.execute(f"SELECT {_COLUMNS} FROM runs WHERE id = ?", (run_id,)).fetchone()  # noqa: S608 - constants
    if row is None:
        raise ConfigError(f"no run {run_id!r} here; `list` names those that there are")
    return _run(row)


def _run(row: tuple[str, str, bytes, str, str, int, int, float]) -> Run:
    run_id, name, settings, state, cause, policy_version, groups_issued, created_at = row
    return Run(
        id=run_id,
        name=name,
        settings=msgspec.json.decode(settings, type=RunSettings),
        state=RunState(state),
        cause=cause,
        policy_version=policy_version,
        groups_issued=groups_issued,
        created_at=created_at,
    )


def _set_state(connection: sqlite3.Connection, run_id: str, state: RunState, cause: str) -> Run:
    run = _get(connection, run_id)
    if run.state is RunState.STOPPED and state is not RunState.STOPPED:
        raise ConfigError(f"run {run_id} was stopped by {run.cause or 'somebody'} and stays so; create a new run")
    if run.state is state:
        return run
    connection.execute("UPDATE runs SET state = ?, cause = ? WHERE id = ?", (state.value, cause, run_id))
    return _get(connection, run_id)


def _publish(connection: sqlite3.Connection, run_id: str, version: int) -> None:
    run = _get(connection, run_id)
    if version < run.policy_version:
        raise ConfigError(f"run {run_id} is at policy version {run.policy_version}; {version} is older and not taken")
    connection.execute("UPDATE runs SET policy_version = ? WHERE id = ?", (version, run_id))


def _news(connection: sqlite3.Connection, *, run_id: str, after: int) -> tuple[Run, list[MetricPoint], int]:
    points, last = metrics.load(connection, run_id, after=after, limit=_HISTORY_PAGE)
    return _get(connection, run_id), points, last
