"""Which groups may start now: the window ahead of the trainer, leases, and what a waiting worker waits for.

Functions of one SQLite connection; the caller chooses the transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from envfarm.core.run import Run, RunState

HARD_LEASES = 6
"""A ticket that nothing was recorded for is given to another after this many leases, however alive its holder is."""


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long a ticket stays its holder's, in seconds since the holder was heard of or a record of the group came.

    ``silence`` is for holders that have reported metrics and so are expected to go on, ``lease`` for those that never
    did. Nothing counts as silence before ``since``, when this registry began to listen (seconds since the epoch).
    """

    lease: float
    silence: float
    since: float


_OPEN = """
    FROM tickets AS t
    LEFT JOIN groups AS g ON g.run_id = t.run_id AND g.purpose = :purpose AND g.group_id = t.group_id
    WHERE t.run_id = :run AND g.position IS NULL
"""
_EXPIRES = (
    "CASE WHEN t.heard_at < 0 THEN 0 ELSE"
    " min(max(t.heard_at, coalesce(g.updated_at, 0), :since) + iif(t.reporting, :silence, :lease),"
    f" max(t.issued_at, coalesce(g.updated_at, 0)) + {HARD_LEASES} * :lease) END"
)


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`look` found: groups that may start now, or the reason why none may and when to look again."""

    expired: int
    fresh: int
    waiting_for: str
    look_again_s: float

    @property
    def any(self) -> bool:
        """Whether a ticket can be had."""
        return self.expired + self.fresh > 0


def window(run: Run) -> int:
    """Most groups that may be issued and not consumed, so that no trained token is older than the staleness bound."""
    return run.settings.groups_per_version * (1 + run.settings.staleness)


def look(
    connection: sqlite3.Connection, run: Run, *, limit: int, patience: Patience, now: float, request_id: str = ""
) -> Outlook:
    """How many tickets could be issued at ``now`` (at most ``limit``), or why none.

    Those that ``request_id`` was given before count, whatever the run does now: their answer was lost on its way.
    """
    if repeated := _issued_before(connection, run.id, request_id):
        return Outlook(expired=len(repeated), fresh=0, waiting_for="", look_again_s=0.0)
    if run.state is not RunState.RUNNING:
        by = f" by {run.cause}" if run.cause else ""
        return Outlook(expired=0, fresh=0, waiting_for=f"run is {run.state.value}{by}", look_again_s=60.0)
    of_run = _of(run, patience, now)
    running, expired, expires = connection.execute(
        f"SELECT count(*), coalesce(sum({_EXPIRES} <= :now), 0), min({_EXPIRES}) {_OPEN}",
        of_run,
    ).fetchone()
    ahead = run.groups_issued - consumed(connection, run.id)
    fresh = limit if run.settings.purpose != "train" else max(0, min(limit, window(run) - ahead))
    most = run.settings.groups
    if most is not None:
        fresh = max(0, min(fresh, most - run.groups_issued))
    return Outlook(
        expired=min(expired, limit),
        fresh=min(fresh, limit - min(expired, limit)),
        waiting_for="" if fresh or expired else _all_out(run, running) or _ahead(run, ahead, running),
        look_again_s=max(0.0, expires - now) if expires is not None else 60.0,
    )


def consumed(connection: sqlite3.Connection, run_id: str) -> int:
    """Groups that a consumer of the run is done with, dropped ones included."""
    query = "SELECT coalesce(max(position), 0) FROM consumers WHERE run_id = ?"
    return int(connection.execute(query, (run_id,)).fetchone()[0])


def issue(
    connection: sqlite3.Connection,
    run: Run,
    *,
    worker: str,
    request_id: str,
    limit: int,
    patience: Patience,
    now: float,
) -> list[int]:
    """Numbers of the groups that ``worker`` may start: expired tickets first, then new ones.

    A repeated ``request_id`` gets the same numbers again.
    """
    if repeated := _issued_before(connection, run.id, request_id):
        return repeated
    outlook = look(connection, run, limit=limit, patience=patience, now=now)
    if not outlook.any:
        return []
    of_run = _of(run, patience, now) | {"limit": outlook.expired}
    rows = connection.execute(
        f"SELECT t.number {_OPEN} AND {_EXPIRES} <= :now ORDER BY t.number LIMIT :limit",
        of_run,
    ).fetchall()
    numbers = [number for (number,) in rows]
    numbers += range(run.groups_issued, run.groups_issued + outlook.fresh)
    connection.executemany(
        "INSERT OR REPLACE INTO tickets (run_id, number, group_id, worker, request_id, issued_at, heard_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(run.id, number, group_id(run.id, number), worker, request_id, now, now) for number in numbers],
    )
    connection.execute("UPDATE runs SET groups_issued = groups_issued + ? WHERE id = ?", (outlook.fresh, run.id))
    return numbers


def hear(connection: sqlite3.Connection, run_id: str, worker: str, now: float, *, reporting: bool = False) -> None:
    """Renew the leases of ``worker``: it has just been heard of; with ``reporting`` it will be again soon."""
    connection.execute(
        "UPDATE tickets SET heard_at = ?, reporting = max(reporting, ?) WHERE run_id = ? AND worker = ?"
        " AND heard_at >= 0",
        (now, int(reporting), run_id, worker),
    )


def oldest_heard(connection: sqlite3.Connection, run_id: str, worker: str) -> float | None:
    """When ``worker`` was last heard of, by its least renewed ticket; ``None`` when it holds none."""
    query = "SELECT min(heard_at) FROM tickets WHERE run_id = ? AND worker = ?"
    (at,) = connection.execute(query, (run_id, worker)).fetchone()
    return None if at is None else float(at)


def take_back(connection: sqlite3.Connection, run_id: str, numbers: Sequence[int]) -> None:
    """Let the next asker have these: they never reached their worker."""
    connection.executemany(
        "UPDATE tickets SET heard_at = -1, request_id = '' WHERE run_id = ? AND number = ?",
        [(run_id, number) for number in numbers],
    )


def forget_whole(connection: sqlite3.Connection, run: Run, before: float) -> None:
    """Drop tickets issued before ``before`` whose groups are whole, so that the table stays as small as the window."""
    connection.execute(
        "DELETE FROM tickets WHERE run_id = :run AND issued_at < :before AND EXISTS (SELECT 1 FROM groups AS g"
        " WHERE g.run_id = :run AND g.purpose = :purpose AND g.group_id = tickets.group_id AND g.position IS NOT NULL)",
        {"run": run.id, "purpose": run.settings.purpose, "before": before},
    )


def group_id(run_id: str, number: int) -> str:
    """The id of a run's group: it follows from its number, so that a ticket issued again means the same group."""
    return f"{run_id}/{number}"


def _of(run: Run, patience: Patience, now: float) -> dict[str, str | float]:
    """Parameters of the queries over a run's open tickets."""
    return {"run": run.id, "purpose": run.settings.purpose, "now": now, **msgspec.structs.asdict(patience)}


def _issued_before(connection: sqlite3.Connection, run_id: str, request_id: str) -> list[int]:
    if not request_id:
        return []
    query = "SELECT number FROM tickets WHERE run_id = ? AND request_id = ? ORDER BY number"
    return [number for (number,) in connection.execute(query, (run_id, request_id))]


def _all_out(run: Run, running: int) -> str:
    most = run.settings.groups
    if most is None or run.groups_issued < most:
        return ""
    return f"nothing: all {most} groups of the run were handed out ({running} of them are still running)"


def _ahead(run: Run, ahead: int, running: int) -> str:
    versions = ahead / run.settings.groups_per_version
    text = f"{versions:.3g} policy versions ahead of the trainer: {ahead} groups are waiting to be consumed"
    return f"{text} ({running} of them are still running)" if running else text
