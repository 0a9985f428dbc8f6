"""Series of metrics in SQLite: bounded, and readable from where a watcher left off.

A series is (run, name, source); a second value for the same step replaces the first. A series that grows past its
bound loses every second point of its older half, so that it stays whole in shape.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence

from envfarm.core.errors import ConfigError
from envfarm.core.run import MetricPoint

POINTS_PER_SERIES = 10_000
SERIES_PER_RUN = 2_000
POINTS_PER_REPORT = 10_000
_NAME_LENGTH = 200


def check(points: Sequence[MetricPoint]) -> None:
    """Refuse reports that cannot be stored. Raises ``ConfigError``."""
    if len(points) > POINTS_PER_REPORT:
        raise ConfigError(f"{len(points)} points in one report; at most {POINTS_PER_REPORT} are taken")
    for point in points:
        if not 0 < len(point.name) <= _NAME_LENGTH or len(point.source) > _NAME_LENGTH:
            raise ConfigError(
                f"metric {point.name[:40]!r} needs a name and source of at most {_NAME_LENGTH} characters"
            )
        if point.step < 0:
            raise ConfigError(f"metric {point.name!r} has step {point.step}; steps count from 0")


def store(connection: sqlite3.Connection, run_id: str, points: Sequence[MetricPoint]) -> None:
    """Add ``points`` and keep every series within its bound."""
    series = {(point.name, point.source) for point in points}
    _check_series(connection, run_id, series)
    connection.executemany(
        "INSERT OR REPLACE INTO metrics (run_id, name, source, step, value, at) VALUES (?, ?, ?, ?, ?, ?)",
        [
            (run_id, p.name, p.source, p.step, None if math.isnan(p.value) else p.value, p.at)  # NaN is NULL in SQLite
            for p in points
        ],
    )
    for name, source in series:
        _thin(connection, run_id, name, source)


def load(
    connection: sqlite3.Connection, run_id: str, *, after: int, limit: int, name: str | None = None
) -> tuple[list[MetricPoint], int]:
    """Points whose sequence number is greater than ``after``, in the order of arrival, and the last such number."""
    rows = connection.execute(
        "SELECT seq, name, step, value, at, source FROM metrics"
        " WHERE run_id = ? AND seq > ? AND (? IS NULL OR name = ?) ORDER BY seq LIMIT ?",
        (run_id, after, name, name, limit),
    ).fetchall()
    points = [
        MetricPoint(name=n, step=step, value=math.nan if value is None else value, at=at, source=source)
        for _, n, step, value, at, source in rows
    ]
    return points, rows[-1][0] if rows else after


def last(connection: sqlite3.Connection) -> int:
    """Highest sequence number of any run, 0 when there is none."""
    return int(connection.execute("SELECT coalesce(max(seq), 0) FROM metrics").fetchone()[0])


def _check_series(connection: sqlite3.Connection, run_id: str, series: set[tuple[str, str]]) -> None:
    known = "SELECT 1 FROM metrics WHERE run_id = ? AND name = ? AND source = ? LIMIT 1"
    new = sum(connection.execute(known, (run_id, *key)).fetchone() is None for key in series)
    if not new:
        return
    (count,) = connection.execute(
        "SELECT count(*) FROM (SELECT DISTINCT name, source FROM metrics WHERE run_id = ?)", (run_id,)
    ).fetchone()
    if count + new > SERIES_PER_RUN:
        raise ConfigError(f"run {run_id} has {count} series, at most {SERIES_PER_RUN}: use fewer names or sources")


def _thin(connection: sqlite3.Connection, run_id: str, name: str, source: str) -> None:
    key = (run_id, name, source)
    of_series = "FROM metrics WHERE run_id = ? AND name = ? AND source = ?"
    (count,) = connection.execute(f"SELECT count(*) {of_series}", key).fetchone()
    if count <= POINTS_PER_SERIES:
        return
    connection.execute(
        f"DELETE FROM metrics WHERE seq IN (SELECT seq FROM (SELECT seq, row_number() OVER (ORDER BY step) AS n"  # noqa: S608 - constants
        f" {of_series}) WHERE n <= ? AND n % 2 = 0)",
        (*key, count // 2),
    )
