"""Where records go: the rows that one append adds, found with a handful of statements however many records it has.

Few statements matter beyond their own cost: SQLite gives the interpreter's lock back around each, and a busy event
loop may take milliseconds to return it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from envfarm.core.errors import LogError
from envfarm.core.log import Appended, LogRecord
from envfarm.core.outcome import OutcomeKind

GROUP_BYTES = 60 * 1024 * 1024
"""Most payload of one group: it is handed to a consumer in one message."""
_ROWS = 64  # rows per statement, so that few different statements are compiled

T = TypeVar("T")
Key = tuple[str, str, str]  # run, purpose, group


class _Group:
    """A group while records are added to it; ``members`` are those that have their final record."""

    __slots__ = ("bytes", "changed", "gid", "members", "position", "size")

    def __init__(self, gid: int, size: int, position: int | None, members: set[int], stored: int) -> None:
        self.gid = gid
        self.size = size
        self.position = position
        self.members = members
        self.bytes = stored
        self.changed = False

    def take(self, record: LogRecord) -> bool:
        """Whether ``record`` becomes the one that stands for its member. Raises ``LogError`` when it does not fit."""
        header = record.header
        if header.group_size != self.size:
            raise LogError(
                f"record {header.id} says that group {header.group_id} has {header.group_size} members, "
                f"its first record said {self.size}"
            )
        if not header.final or self.position is not None or header.member in self.members:
            return False
        self.bytes += len(record.payload)
        if self.bytes > GROUP_BYTES:
            raise LogError(
                f"group {header.group_id} would take {self.bytes} bytes with record {header.id}, "
                f"{GROUP_BYTES} are allowed: lower the group size or Limits.context_tokens"
            )
        self.members.add(header.member)
        self.changed = True
        return True

    @property
    def whole(self) -> bool:
        """Whether every member has its final record now."""
        return len(self.members) == self.size


def place(connection: sqlite3.Connection, records: Sequence[LogRecord], now: float) -> list[Appended]:
    """Store ``records`` with all that follows from them, inside the caller's transaction. Raises ``LogError``."""
    known = _known(connection, [record.header.id for record in records])
    fresh: list[LogRecord] = []
    answers: list[Appended] = []
    for record in records:
        name = record.header.id
        answers.append(Appended(id=name, duplicate=name in known))
        if name not in known:
            known.add(name)
            fresh.append(record)
    groups: dict[Key, _Group] = {}
    finished: list[Key] = []  # in the order in which they became whole
    rows: list[tuple[object, ...]] = []
    for record in fresh:
        header = record.header
        key: Key = (header.run_id, header.purpose, header.group_id)
        group = groups.get(key) or groups.setdefault(key, _open(connection, record, now))
        counted = group.take(record)
        if counted and group.whole:
            finished.append(key)
        encoded = msgspec.msgpack.encode(header)
        rows.append((header.id, header.run_id, group.gid, header.member, int(counted), encoded, record.payload))
    for some in _chunks(rows):
        values = ", ".join(["(?, ?, ?, ?, ?, ?, ?)"] * len(some))
        connection.execute(
            f"INSERT INTO records (id, run_id, gid, member, counted, header, payload) VALUES {values}",  # noqa: S608 - marks
            [value for row in some for value in row],
        )
    _update(connection, (group for group in groups.values() if group.changed))
    for key in finished:
        _number(connection, key, groups[key])
    _add_totals(connection, fresh, finished)
    return answers


def _known(connection: sqlite3.Connection, ids: Sequence[str]) -> set[str]:
    """Those of ``ids`` that are stored already."""
    found: set[str] = set()
    for some in _chunks(ids):
        marks = ", ".join("?" * len(some))
        query = f"SELECT id FROM records WHERE id IN ({marks})"  # noqa: S608 - marks
        found.update(name for (name,) in connection.execute(query, some))
    return found


def _open(connection: sqlite3.Connection, record: LogRecord, now: float) -> _Group:
    """The record's group, made when there is none; either way it has been heard of ``now``."""
    header = record.header
    gid, size, members, stored, position = connection.execute(
        "INSERT INTO groups (run_id, purpose, group_id, size, updated_at) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (run_id, purpose, group_id) DO UPDATE SET updated_at = excluded.updated_at"
        " RETURNING gid, size, members, bytes, position",
        (header.run_id, header.purpose, header.group_id, header.group_size, now),
    ).fetchone()
    there: set[int] = set()
    if members and position is None:
        query = "SELECT member FROM records WHERE gid = ? AND counted = 1"
        there = {member for (member,) in connection.execute(query, (gid,))}
    return _Group(gid, size, position, there, stored)


def _update(connection: sqlite3.Connection, groups: Iterable[_Group]) -> None:
    connection.executemany(
        "UPDATE groups SET members = ?, bytes = ? WHERE gid = ?", [(len(g.members), g.bytes, g.gid) for g in groups]
    )


def _number(connection: sqlite3.Connection, key: Key, group: _Group) -> None:
    """Give a group that has just become whole the next position of its run and purpose."""
    connection.execute(
        "UPDATE groups SET position = (SELECT coalesce(max(position), 0) + 1 FROM groups"
        " WHERE run_id = ? AND purpose = ? AND position IS NOT NULL) WHERE gid = ?",
        (*key[:2], group.gid),
    )


def _add_totals(connection: sqlite3.Connection, fresh: Iterable[LogRecord], finished: Iterable[Key]) -> None:
    totals: dict[str, list[int]] = {}
    for record in fresh:
        outcome = record.header.outcome
        total = totals.setdefault(record.header.run_id, [0, 0, 0, 0, 0])
        total[0] += 1
        total[1] += outcome.trainable
        total[2] += outcome.kind is OutcomeKind.INFRA_FAILED
        total[4] += len(record.payload)
    for run_id, _, _ in finished:
        totals[run_id][3] += 1
    connection.executemany(
        "INSERT INTO totals (run_id, records, trainable, infra_failed, groups, bytes) VALUES (?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (run_id) DO UPDATE SET records = records + excluded.records,"
        " trainable = trainable + excluded.trainable, infra_failed = infra_failed + excluded.infra_failed,"
        " groups = groups + excluded.groups, bytes = bytes + excluded.bytes",
        [(run_id, *total) for run_id, total in totals.items()],
    )


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for at in range(0, len(items), _ROWS):
        yield items[at : at + _ROWS]
