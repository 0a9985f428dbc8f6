"""Connections to the SQLite file, and what its errors mean to a person."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

from envfarm.core.errors import CorruptRecord, LogError, LogFull

BUSY_SECONDS = 10.0
PAGE_BYTES = 16_384  # a trajectory of 2,048 tokens fits one page; measured against 4 and 64 KiB
_CHECKPOINT_PAGES = 2_048
_KEEP_WAL_BYTES = 64 * 1024 * 1024
_ROOM_BYTES = 1024 * 1024


def connect(path: Path) -> sqlite3.Connection:
    """A read-write connection: WAL, every commit reaches the disk, transactions begun by hand.

    Made in one thread and used in another, one at a time. Raises ``sqlite3.Error``.
    """
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit = {_KEEP_WAL_BYTES}")
    except BaseException:
        connection.close()
        raise
    return connection


def connect_reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write. Raises ``sqlite3.Error``, also when there is no such file."""
    uri = f"{path.absolute().as_uri()}?mode=ro"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)


def as_log_error(error: BaseException, path: Path) -> LogError:
    """The farm's error for one that SQLite or the operating system raised: what is wrong and what helps."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and not _has_room(path)):
        return LogFull(f"no room left for {path}: free space on its disk; nothing was acknowledged, send again")
    if code == sqlite3.SQLITE_READONLY or (code == sqlite3.SQLITE_CANTOPEN and _read_only(path)):
        return LogError(f"{path} is read-only here: remount its disk or change its owner")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return LogError(f"{path} has been locked by another process for {BUSY_SECONDS:g} s: end that process")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return CorruptRecord(f"{path} is damaged ({error}): save what is left with `sqlite3 {path} .recover`")
    if code == sqlite3.SQLITE_CANTOPEN:
        return LogError(f"cannot open {path}: its folder must exist and be writable")
    return LogError(f"{path}: {type(error).__name__}: {error}")


def _read_only(path: Path) -> bool:
    try:
        return bool(os.statvfs(path.parent).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _has_room(path: Path) -> bool:
    try:
        return shutil.disk_usage(path.parent).free >= _ROOM_BYTES
    except OSError:
        return True
