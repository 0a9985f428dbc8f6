"""Tables of ``farm.db``, in one place because the run registry reads what the trajectory log writes.

``groups``      one row per group that has a record; ``position`` is set in the transaction that makes it whole
``records``     trajectories in the order of arrival; ``counted`` marks the final record that stands for a member
``totals``      what ``TrajectoryLog.counts`` answers, kept as records come
``consumers``   committed positions
``runs``        one experiment each; ``settings`` is JSON of ``RunSettings``
``tickets``     groups handed out: to whom, when, when the holder was last heard of, and whether it reports
``metrics``     points of series; ``seq`` grows with every change, so that a watcher asks for what is new
"""

from __future__ import annotations

import sqlite3

from envfarm.core.errors import ConfigError

VERSION = 1

TABLES = """
CREATE TABLE groups (
    gid INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL,
    purpose TEXT NOT NULL,
    group_id TEXT NOT NULL,
    size INTEGER NOT NULL,
    members INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0,
    position INTEGER,
    updated_at REAL NOT NULL,
    UNIQUE (run_id, purpose, group_id)
);
CREATE UNIQUE INDEX groups_by_position ON groups (run_id, purpose, position) WHERE position IS NOT NULL;
CREATE TABLE records (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    run_id TEXT NOT NULL,
    gid INTEGER NOT NULL REFERENCES groups,
    member INTEGER NOT NULL,
    counted INTEGER NOT NULL,
    header BLOB NOT NULL,
    payload BLOB NOT NULL
);
CREATE INDEX records_by_run ON records (run_id);
CREATE UNIQUE INDEX records_by_place ON records (gid, member) WHERE counted = 1;
CREATE TABLE totals (
    run_id TEXT PRIMARY KEY,
    records INTEGER NOT NULL,
    trainable INTEGER NOT NULL,
    infra_failed INTEGER NOT NULL,
    groups INTEGER NOT NULL,
    bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE consumers (
    run_id TEXT NOT NULL,
    consumer TEXT NOT NULL,
    position INTEGER NOT NULL,
    PRIMARY KEY (run_id, consumer)
) WITHOUT ROWID;
CREATE TABLE runs (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    request_id TEXT UNIQUE,
    name TEXT NOT NULL,
    settings BLOB NOT NULL,
    state TEXT NOT NULL,
    cause TEXT NOT NULL,
    policy_version INTEGER NOT NULL,
    groups_issued INTEGER NOT NULL,
    created_at REAL NOT NULL
);
CREATE TABLE tickets (
    run_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    group_id TEXT NOT NULL,
    worker TEXT NOT NULL,
    request_id TEXT NOT NULL,
    issued_at REAL NOT NULL,
    heard_at REAL NOT NULL,
    reporting INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (run_id, number)
) WITHOUT ROWID;
CREATE INDEX tickets_by_request ON tickets (run_id, request_id);
CREATE TABLE metrics (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    run_id TEXT NOT NULL,
    name TEXT NOT NULL,
    source TEXT NOT NULL,
    step INTEGER NOT NULL,
    value REAL,
    at REAL NOT NULL,
    UNIQUE (run_id, name, source, step)
);
CREATE INDEX metrics_by_arrival ON metrics (run_id, seq);
"""


def create_or_check(connection: sqlite3.Connection) -> None:
    """Make the tables in an empty file. Raises ``ConfigError`` when a newer release made them."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise ConfigError(f"the file has layout {version}, this release knows {VERSION}: use a newer release")
        if version == 0:
            for statement in filter(str.strip, TABLES.split(";")):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {VERSION}")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
