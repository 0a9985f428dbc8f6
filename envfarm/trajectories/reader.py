"""Stored trajectories for people: read a ``farm.db`` without a gateway, also while one writes to it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from envfarm.core.errors import ConfigError
from envfarm.core.trajectory import Trajectory
from envfarm.storage.connection import as_log_error, connect_reader
from envfarm.trajectories.codec import decode


def read_trajectories(path: Path | str, run_id: str | None = None, limit: int | None = None) -> Iterator[Trajectory]:
    """Trajectories in the order in which they arrived: of one run or of all, at most ``limit``.

    One record is in memory at a time. Raises ``ConfigError`` when there is no such file, ``CorruptRecord`` at a record
    that is damaged, ``LogError`` otherwise.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"no trajectories at {path}; expected the farm.db in a gateway's --state folder")
    try:
        with closing(connect_reader(path)) as connection:
            for (payload,) in _payloads(connection, run_id, limit):
                yield decode(payload)
    except sqlite3.Error as error:
        raise as_log_error(error, path) from error


def _payloads(connection: sqlite3.Connection, run_id: str | None, limit: int | None) -> Iterator[tuple[bytes]]:
    most = -1 if limit is None else limit
    if run_id is None:
        return connection.execute("SELECT payload FROM records ORDER BY seq LIMIT ?", (most,))
    query = "SELECT payload FROM records WHERE run_id = ? ORDER BY seq LIMIT ?"
    return connection.execute(query, (run_id, most))
