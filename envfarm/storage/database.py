"""The farm's SQLite file as asynchronous code sees it: changes, queries, and a signal when something has changed."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from envfarm.core.deadline import Deadline
from envfarm.core.errors import FarmError
from envfarm.storage.budget import ByteBudget
from envfarm.storage.connection import as_log_error, connect, connect_reader
from envfarm.storage.schema import create_or_check
from envfarm.storage.writer import Write, Writer

T = TypeVar("T")

QUEUE_BYTES = 32 * 1024 * 1024
POLL_SECONDS = 0.2
"""How soon changes made by other processes are seen; those of this process are seen at once."""
_ROOM_SECONDS = 60.0
_READERS = 2


class Database:
    """One open file: a writer thread with group commit and a few reader threads.

    Used from one event loop. Several processes may open the same file; within one process :meth:`shared` gives all
    users the same object, so that they share the writer instead of waiting for each other's locks.
    """

    _open: ClassVar[dict[Path, Database]] = {}
    _open_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: Path, *, queue_bytes: int = QUEUE_BYTES) -> None:
        """Open or create the file. Does file I/O. Raises ``LogError`` or ``ConfigError``."""
        self.path = path
        try:
            connection = connect(path)
            try:
                create_or_check(connection)
            finally:
                connection.close()
        except (sqlite3.Error, OSError) as error:
            raise as_log_error(error, path) from error
        self.version = 0  # grows with every change that this object has seen
        self.users = 1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._budget = ByteBudget(queue_bytes)
        self._waiters: set[asyncio.Future[None]] = set()
        self._writer = Writer(path, self._settled)
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix=f"reader of {path.name}")
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._watch: sqlite3.Connection | None = None
        self._watch_lock = threading.Lock()
        self._data_version = 0
        self._polled_at = 0.0

    @classmethod
    def shared(cls, path: Path) -> Database:
        """The open object for ``path``, or a new one; each user calls :meth:`close` once."""
        key = path.absolute()
        with cls._open_lock:
            found = cls._open.get(key)
            if found is not None and found.usable():
                found.users += 1
                return found
            made = cls._open[key] = cls(key)
            return made

    def usable(self) -> bool:
        """Whether the event loop that uses this object, if any does yet, is still open."""
        return self._loop is None or not self._loop.is_closed()

    async def write(self, change: Callable[[sqlite3.Connection], T], *, size: int = 0) -> T:
        """Run ``change`` in the next transaction; returns once that is on disk.

        Waits while more than the queue's bytes wait already. A ``FarmError`` raised by ``change`` undoes it alone and
        is raised here; when the transaction fails, ``LogFull`` or another ``LogError`` is, and nothing was written.
        """
        await self._budget.take(size, timeout=_ROOM_SECONDS)
        self._loop = asyncio.get_running_loop()
        pending = _Pending(change, size, self._loop.create_future())
        try:
            self._writer.submit(pending)
        except BaseException:
            self._budget.give(size)
            raise
        result: T = await pending.done
        return result

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``query`` on a consistent snapshot, off the loop. Raises ``LogError``."""
        self._loop = asyncio.get_running_loop()
        return await self._loop.run_in_executor(self._readers, self._read, query)

    async def changed(self, seen: int, *, timeout: float) -> int:
        """Wait until :attr:`version` is not ``seen`` any more, or for ``timeout`` seconds; returns the version."""
        deadline = Deadline.after(timeout)
        while self.version == seen and not deadline.expired():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait((waiter,), timeout=min(POLL_SECONDS, deadline.remaining()))
            finally:
                self._waiters.discard(waiter)
            if self.version == seen:
                await self._poll()
        return self.version

    async def close(self) -> None:
        """Write what waits and close, once every user of a shared object has closed it."""
        with self._open_lock:
            self.users -= 1
            if self.users > 0:
                return
            if self._open.get(self.path) is self:
                del self._open[self.path]
        await asyncio.to_thread(self._close)
        self._bump()

    def _close(self) -> None:
        self._writer.close()
        self._readers.shutdown()
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._watch = None

    def _settled(self, batch: Sequence[Any], committed: bool) -> None:
        """Carry a batch's outcomes from the writer's thread into the loop."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        try:
            loop.call_soon_threadsafe(self._deliver, batch, committed)
        except RuntimeError:  # the loop was closed in this moment: nobody is left to tell
            return

    def _deliver(self, batch: Sequence[_Pending], committed: bool) -> None:
        for pending in batch:
            self._budget.give(pending.size)
            pending.deliver()
        if committed:
            self._bump()

    def _bump(self) -> None:
        self.version += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        try:
            connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
            if connection is None:
                connection = self._local.connection = self._remember(connect_reader(self.path))
            connection.execute("BEGIN")
            try:
                return query(connection)
            finally:
                connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise as_log_error(error, self.path) from error

    def _remember(self, connection: sqlite3.Connection) -> sqlite3.Connection:
        self._connections.append(connection)
        return connection

    async def _poll(self) -> None:
        """Look for changes by other processes, at most once per interval however many wait."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._polled_at < POLL_SECONDS:
            return
        self._polled_at = loop.time()
        version = await loop.run_in_executor(self._readers, self._read_data_version)
        if version != self._data_version:
            self._data_version = version
            self._bump()

    def _read_data_version(self) -> int:
        with self._watch_lock:
            try:
                if self._watch is None:
                    self._watch = self._remember(connect_reader(self.path))
                (version,) = self._watch.execute("PRAGMA data_version").fetchone()
            except sqlite3.Error as error:
                raise as_log_error(error, self.path) from error
            return int(version)


class _Pending(Write):
    """A write with the caller that waits for it."""

    __slots__ = ("done",)

    def __init__(self, change: Callable[[sqlite3.Connection], Any], size: int, done: asyncio.Future[Any]) -> None:
        super().__init__(change, size)
        self.done = done

    def deliver(self) -> None:
        """Answer the caller, unless it has gone."""
        if self.done.done():
            return
        if isinstance(self.outcome, FarmError):
            self.done.set_exception(_fresh(self.outcome))
        else:
            self.done.set_result(self.outcome)


def _fresh(error: FarmError) -> FarmError:
    """A copy: one error object raised in many tasks would collect all their tracebacks."""
    return type(error)(str(error))
