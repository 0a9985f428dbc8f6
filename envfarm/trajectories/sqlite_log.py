"""The trajectory log of one machine: SQLite in WAL mode, acknowledged once a transaction is on disk.

A record belongs to a group by (run, purpose, group). The first final record of a member stands for that member; when
every member has one, the group gets the next position of (run, purpose) in the same transaction. Records that come
later (a second worker ran the same ticket) are kept and counted, but change no group.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from envfarm.core.deadline import Deadline
from envfarm.core.errors import LogError
from envfarm.core.log import Appended, Group, LogCounts, LogRecord
from envfarm.core.trajectory import PURPOSES, Purpose, TrajectoryHeader
from envfarm.storage.database import Database
from envfarm.trajectories.placement import place

_PAGE_BYTES = 16 * 1024 * 1024  # groups read at once, beyond the first
_HEADER_BYTES = 512  # about what a header and its index entries take
_MAX_GROUP = 65_536


class SqliteLog:
    """A ``TrajectoryLog`` in one file. Used from one event loop; several processes may open the same file."""

    def __init__(self, path: Path | str, *, clock: Callable[[], float] = time.time) -> None:
        """Open or create ``path``. Does file I/O. Raises ``LogError`` or ``ConfigError``.

        ``clock`` gives seconds since the epoch: when a group last got a record.
        """
        self._database = Database.shared(Path(path))
        self._clock = clock

    async def append(self, records: Sequence[LogRecord]) -> Sequence[Appended]:
        """Store ``records``, all or none; returns when they are on disk, in the order given.

        Raises ``LogFull`` or ``LogError`` (nothing was stored) and ``Unavailable`` when the queue in front of the disk
        stayed full. Safe to repeat: an id that is there already is not stored again.
        """
        if not records:
            return []
        for record in records:
            _check(record)
        size = sum(len(record.payload) + _HEADER_BYTES for record in records)
        now = self._clock()
        return await self._database.write(lambda connection: place(connection, records, now), size=size)

    async def groups(self, run_id: str, *, purpose: Purpose, after: int, limit: int, timeout: float) -> Sequence[Group]:
        """Whole groups at positions greater than ``after``, in order, at most ``limit`` of them and about 16 MiB.

        Waits up to ``timeout`` seconds for the first; empty when none came. Raises ``LogError``.
        """
        deadline = Deadline.after(timeout)
        while True:
            seen = self._database.version
            found = await self._database.read(lambda c: _groups(c, run_id, purpose, after, limit))
            if found or deadline.expired():
                return found
            await self._database.changed(seen, timeout=deadline.remaining())

    async def commit(self, run_id: str, consumer: str, position: int) -> None:
        """Note, durably, that ``consumer`` is done up to ``position``. An older position changes nothing.

        Raises ``LogError`` for a position that the run has not reached.
        """
        await self._database.write(lambda connection: _commit(connection, run_id, consumer, position))

    async def committed(self, run_id: str, consumer: str) -> int:
        """Last committed position, 0 when there is none."""
        query = "SELECT position FROM consumers WHERE run_id = ? AND consumer = ?"
        row = await self._database.read(lambda c: c.execute(query, (run_id, consumer)).fetchone())
        return int(row[0]) if row else 0

    async def counts(self, run_id: str) -> LogCounts:
        """Totals of one run, all zero for a run without records."""
        query = "SELECT records, trainable, infra_failed, groups, bytes FROM totals WHERE run_id = ?"
        row = await self._database.read(lambda c: c.execute(query, (run_id,)).fetchone())
        return LogCounts(**dict(zip(LogCounts.__struct_fields__, row or (0,) * 5, strict=True)))

    async def close(self) -> None:
        """Write what waits and close."""
        await self._database.close()


def _check(record: LogRecord) -> None:
    """Refuse what could never be part of a group. Raises ``LogError``."""
    header = record.header
    if not (header.id and header.run_id and header.group_id):
        raise LogError(f"record {header.id!r} must name itself, its run and its group")
    if not 1 <= header.group_size <= _MAX_GROUP or not 0 <= header.member < header.group_size:
        raise LogError(
            f"record {header.id} is member {header.member} of a group of {header.group_size}: no such member"
        )
    if header.purpose not in PURPOSES:
        raise LogError(f"record {header.id} has purpose {header.purpose!r}; expected one of {', '.join(PURPOSES)}")


def _groups(connection: sqlite3.Connection, run_id: str, purpose: Purpose, after: int, limit: int) -> list[Group]:
    heads = connection.execute(
        "SELECT gid, position, group_id FROM groups WHERE run_id = ? AND purpose = ? AND position > ?"
        " ORDER BY position LIMIT ?",
        (run_id, purpose, after, limit),
    ).fetchall()
    groups: list[Group] = []
    size = 0
    for gid, position, group_id in heads:
        rows = connection.execute(
            "SELECT header, payload FROM records WHERE gid = ? AND counted = 1 ORDER BY member", (gid,)
        )
        records = tuple(LogRecord(header=_HEADERS.decode(header), payload=payload) for header, payload in rows)
        groups.append(Group(position=position, group_id=group_id, records=records))
        size += sum(len(record.payload) for record in records)
        if size >= _PAGE_BYTES:
            break
    return groups


_HEADERS = msgspec.msgpack.Decoder(TrajectoryHeader)


def _commit(connection: sqlite3.Connection, run_id: str, consumer: str, position: int) -> None:
    (last,) = connection.execute(
        "SELECT coalesce(max(position), 0) FROM groups WHERE run_id = ? AND position IS NOT NULL", (run_id,)
    ).fetchone()
    if not 0 <= position <= last:
        raise LogError(f"{consumer} commits position {position} of run {run_id}, which has {last} whole groups")
    connection.execute(
        "INSERT INTO consumers (run_id, consumer, position) VALUES (?, ?, ?)"
        " ON CONFLICT (run_id, consumer) DO UPDATE SET position = max(position, excluded.position)",
        (run_id, consumer, position),
    )
