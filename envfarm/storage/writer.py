"""The one thread that writes: everything that waits goes into one transaction, and is answered once that is on disk."""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from envfarm.core.errors import FarmError, LogError
from envfarm.storage.connection import as_log_error, connect

Change = Callable[[sqlite3.Connection], Any]
"""One unit of work inside a transaction. A ``FarmError`` from it undoes this unit only."""

_TRANSACTION_BYTES = 16 * 1024 * 1024


class Write:
    """A change that waits for the writer. ``size`` is in bytes and only bounds how much shares a transaction."""

    __slots__ = ("change", "outcome", "size")

    def __init__(self, change: Change, size: int) -> None:
        self.change = change
        self.size = size
        self.outcome: Any = None


class Writer:
    """Runs writes in the order of submission. ``settle`` gets each batch once its outcomes are final.

    An outcome is the change's result, or the ``FarmError`` it failed with. ``settle`` is called in the writer's thread
    and also learns whether the transaction was committed.
    """

    def __init__(self, path: Path, settle: Callable[[Sequence[Any], bool], None]) -> None:
        self._path = path
        self._settle = settle
        self._queue: deque[Write] = deque()
        self._filled = threading.Condition()
        self._closing = False
        self._connection: sqlite3.Connection | None = None
        self._thread = threading.Thread(target=self._run, name=f"writer of {path.name}", daemon=True)
        self._thread.start()

    def submit(self, write: Write) -> None:
        """Queue ``write``. Raises ``LogError`` when the writer is closing."""
        with self._filled:
            if self._closing:
                raise LogError(f"{self._path} is closed")
            self._queue.append(write)
            self._filled.notify()

    def close(self) -> None:
        """Write what waits, then end. Blocks; call it outside the event loop's thread."""
        with self._filled:
            self._closing = True
            self._filled.notify()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._take():
            committed = self._write(batch)
            self._settle(batch, committed)
        self._disconnect()

    def _take(self) -> list[Write]:
        """All that waits, up to a transaction's size; empty when closing."""
        with self._filled:
            self._filled.wait_for(lambda: self._queue or self._closing)
            batch: list[Write] = []
            size = 0
            while self._queue and (not batch or size + self._queue[0].size <= _TRANSACTION_BYTES):
                write = self._queue.popleft()
                size += write.size
                batch.append(write)
            return batch

    def _write(self, batch: Sequence[Write]) -> bool:
        """One transaction for ``batch``; whether it was committed. Fills in the outcomes either way."""
        try:
            if self._connection is None:
                self._connection = connect(self._path)
            self._transact(self._connection, batch)
        except Exception as error:  # whatever broke, every waiting caller must hear of it
            self._disconnect()  # a connection that failed halfway is not trusted with the next batch
            failure = as_log_error(error, self._path)
            for write in batch:
                write.outcome = failure
            return False
        return True

    def _transact(self, connection: sqlite3.Connection, batch: Sequence[Write]) -> None:
        connection.execute("BEGIN IMMEDIATE")
        for write in batch:
            connection.execute("SAVEPOINT one")
            try:
                write.outcome = write.change(connection)
            except FarmError as error:
                write.outcome = error
                connection.execute("ROLLBACK TO one")
            except (sqlite3.IntegrityError, sqlite3.ProgrammingError, OverflowError, TypeError, ValueError) as error:
                write.outcome = LogError(f"{self._path} refused a record: {type(error).__name__}: {error}")
                connection.execute("ROLLBACK TO one")
            connection.execute("RELEASE one")
        connection.execute("COMMIT")

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()  # rolls back whatever was open
