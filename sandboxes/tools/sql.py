"""SQL for models: one SQLite database per episode.

**Where it runs.** SQL is code that a model wrote, so it runs where such code runs: inside the sandbox, in a process
that is kept from call to call. A query that hangs, eats memory or brings SQLite itself down is then the trouble of one
process of one slot, and no neighbour's. In the host it would share a process, and SQLite's heap limit, with every other
slot. What is paid for that is the start of an interpreter per episode, and that an image has to contain Python.
SQLite's authorizer and limits stand inside as well (see :mod:`sandboxes.tools.sql_inside`): they keep statements to
this database and turn what is too much into a sentence.

**Where it lives.** In a file of the workspace, where a shell may use it too. An environment that offers the model no
other way to files than this toolset can rely on ``read_only`` and on what it finds in the database in the end.

The tools are called ``execute_sql`` and ``get_schema``, as in the database servers that agents commonly use.
"""

from __future__ import annotations

import asyncio
import base64
import sqlite3
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from envfarm.core.environment import Toolset, tool
from envfarm.core.errors import ConfigError, IsolationError, SandboxError, ToolError
from envfarm.core.sandbox import SandboxProcess
from sandboxes.tools import sql_inside
from sandboxes.tools.interpreter import interpreter
from sandboxes.tools.kept_process import KeptProcess, missing

MAX_QUERY = 100_000  # characters
_GRACE_SECONDS = 2.0  # beside the query's own time, after which SQLite stops it
_START_SECONDS = 5.0
_ANSWER_BYTES = 4 * 1024 * 1024
_TOO_LARGE = "too large"  # see sql_inside
_MAGIC = b"SQLite format 3\0"
_PROGRAM = Path(sql_inside.__file__).read_text()
_SCHEMA = "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
_SCHEMA_OF = (
    "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL AND (name = ?1 COLLATE NOCASE OR tbl_name = ?1 COLLATE NOCASE)"
    " ORDER BY type <> 'table', rowid"
)


class _Table(msgspec.Struct, frozen=True, kw_only=True):
    """What one statement brought: rows, or how many it changed (-1: that is no question)."""

    columns: list[str] = []
    rows: list[list[Any]] = []
    more: bool = False
    changed: int | None = None


class _Reply(msgspec.Struct, frozen=True, kw_only=True):
    results: list[_Table]
    untold: int = 0  # statements that ran after those
    error: str = ""
    open: bool = False  # a transaction is, to go on with
    rolled_back: bool = False  # a transaction was, not by a statement


class Sql(Toolset):
    """Query a SQLite database that the environment fills.

    ``content``: what it holds at the start of every episode: a script, a path to a script or to a database file, or
    such a file's bytes; :meth:`fill` in ``reset`` gives each task its own. ``read_only``: nothing can be changed.
    ``path``: its file, seen from the workspace. ``seconds``, ``memory_bytes``: of one call. ``max_rows``,
    ``max_cell`` (characters), ``max_bytes``: what is shown of a result.
    """

    executes = True

    def __init__(
        self,
        content: str | bytes | Path = "",
        *,
        read_only: bool = False,
        path: str = "database.sqlite",
        seconds: float = 5.0,
        memory_bytes: int = 64 * 1024 * 1024,
        max_rows: int = 100,
        max_cell: int = 200,
        max_bytes: int = 12_000,
    ) -> None:
        self._content = content
        self._read_only = read_only
        self._path = path
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._max_rows = max_rows
        self._max_cell = max_cell
        self._max_bytes = max_bytes
        self._kept = KeptProcess()
        self._open = False

    async def reset(self) -> None:
        """Begin with ``content``. A transaction ends with its episode."""
        self._forget()
        if self._content or self._read_only:
            await self.fill(self._content)

    async def fill(self, content: str | bytes | Path) -> None:
        """Put ``content`` in the place of whatever the database holds. Raises :class:`ConfigError` for a bad script.

        A script is trusted as environment code is; it runs in the host, on a database in memory.
        """
        data = await asyncio.to_thread(database, content)
        async with self._kept.call():
            await self._end()  # it may hold the database open
            await self.sandbox.write(self._path, data)

    async def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of a query of the environment's own, for ``verify`` and ``progress``: values as SQLite holds them.

        What the model did in a transaction that is still open is not in them. One that keeps others from reading is
        rolled back.

        Raises :class:`ToolError` with SQLite's message, and when there are more than the sandbox's output can carry.
        """
        reply = await self._run(query, parameters, exact=True, apart=True)
        if reply.error:
            raise ToolError(f"error: {self._sentence(reply.error)}")
        table = reply.results[-1] if reply.results else _Table()
        if table.more:
            raise ToolError("error: too many rows to read at once; select less")
        return [tuple(_value(cell) for cell in row) for row in table.rows]

    @tool
    async def execute_sql(self, query: str) -> str:
        """Run SQL on the SQLite database and return the rows.

        Args:
            query: One statement or several, with semicolons between them. A transaction may span calls.
        """
        reply = await self._run(query, (), exact=False)
        parts = [self._shown(table) for table in reply.results]
        if reply.untold:
            parts.append(f"[... results of {_counted(reply.untold, 'more statement')} are not shown ...]")
        if reply.error:
            parts.append(f"error: {self._sentence(reply.error)}")
        if reply.rolled_back:
            parts.append("[... the transaction that was open has been rolled back ...]")
        if reply.open:
            parts.append("[... a transaction is open: COMMIT keeps its changes, ROLLBACK drops them ...]")
        text = "\n\n".join(parts) or "(no statement)"
        if reply.error and not reply.results:
            raise ToolError(text)
        return self._cut(text)

    @tool
    async def get_schema(self, table: str = "") -> str:
        """Show the statements that made the tables, views and indexes of the database.

        Args:
            table: Only this table or view, with what belongs to it. All when left out.
        """
        reply = await self._run(_SCHEMA_OF if table else _SCHEMA, [table] if table else (), exact=True)
        if reply.error:
            raise ToolError(f"error: {self._sentence(reply.error)}")
        statements = [f"{row[0]};" for row in reply.results[0].rows]
        if not statements and table:
            raise ToolError(f"error: there is no table {table[:100]!r}; get_schema without a table shows all")
        return self._cut("\n".join(statements) or "The database is empty.")

    async def _run(self, query: str, parameters: Sequence[Any], *, exact: bool, apart: bool = False) -> _Reply:
        if len(query) > MAX_QUERY:
            raise ToolError(f"error: the query has {len(query)} characters; at most {MAX_QUERY} are allowed")
        if "\0" in query:
            raise ToolError("error: the query holds a null character")
        request = {
            "query": query,
            "parameters": list(parameters),
            "path": self._path,
            "read_only": self._read_only,
            "seconds": self._seconds,
            "memory_bytes": self._memory_bytes,
            "value_bytes": 1_000_000,
            "exact": exact,
            "apart": apart,
            "answer_bytes": _ANSWER_BYTES,
            "max_rows": 100_000 if exact else self._max_rows,
            "max_cell": self._max_cell,
            "max_bytes": 1 << 20 if exact else self._max_bytes,
        }
        async with self._kept.call():
            return await self._answered(msgspec.json.encode(request))

    async def _answered(self, request: bytes) -> _Reply:
        process = self._kept.running
        fresh = process is None
        if process is None:
            argv = [interpreter(self), "-I", "-S", "-B", "-X", "utf8", "-c", _PROGRAM]
            process = await self._kept.start(self.sandbox, argv)
        data: bytes | None = None
        try:
            async with asyncio.timeout(self._seconds + _GRACE_SECONDS + (_START_SECONDS if fresh else 0.0)):
                await process.write(b"%d\n" % len(request) + request)
                data = await _answer(process)
        except TimeoutError:
            return await self._broken("interrupted")
        except ToolError:
            pass  # it has ended
        if data is None:
            return await self._ended(process, fresh=fresh)
        try:
            reply = msgspec.json.decode(data, type=_Reply)
        except msgspec.DecodeError as error:
            raise SandboxError(f"the answer of the database's process cannot be read: {error}") from None
        lost, self._open = fresh and self._open, reply.open
        if lost:  # it went with the process: others ended that between the calls
            reply = msgspec.structs.replace(reply, rolled_back=True)
        if reply.error == _TOO_LARGE:
            raise ToolError("error: the result is too large; select less")
        return reply

    async def _ended(self, process: SandboxProcess, *, fresh: bool) -> _Reply:
        said = process.errors_now().decode("utf-8", "replace").strip()
        code = await self._kept.close(ends=True)
        if fresh and missing(code, said):
            raise IsolationError(f"Sql needs Python inside the sandbox: there is no {interpreter(self)} in its image")
        if code in (137, -9):
            return await self._broken("out of memory")
        last = said.rpartition("\n")[2]
        return await self._broken(last.partition(": ")[2] or last or f"it ended with {code}")

    async def _broken(self, error: str) -> _Reply:
        """What is told when there was no answer: the process goes, and a transaction with it."""
        was_open = self._open
        await self._end()
        return _Reply(results=[], error=error, rolled_back=was_open)

    async def _end(self) -> None:
        self._open = False
        await self._kept.close()

    def _forget(self) -> None:
        self._open = False
        self._kept.forget()

    def _sentence(self, error: str) -> str:
        if error == "interrupted":
            return f"stopped after {self._seconds:g} s: the query takes too long"
        if error == "out of memory":
            return f"the query needs more than the {self._memory_bytes >> 20} MiB of memory that it may use"
        if self._read_only and "readonly database" in error:
            return "the database is read-only here"
        return error

    def _shown(self, table: _Table) -> str:
        if table.changed is not None:
            return "OK" if table.changed < 0 else f"OK, {_counted(table.changed, 'row')} changed"
        lines = [" | ".join(_flat(cell) for cell in row) for row in (table.columns, *table.rows)]
        lines.insert(1, " | ".join("---" for _ in table.columns))
        if table.more:
            notice = (
                f"[... more rows follow; only the first {len(table.rows)} are shown: use LIMIT, or an aggregate ...]"
            )
        else:
            notice = f"({_counted(len(table.rows), 'row')})"
        return "\n".join([*lines, notice])

    def _cut(self, text: str) -> str:
        data = text.encode("utf-8", "replace")
        if len(data) <= 2 * self._max_bytes:
            return data.decode()
        return data[: 2 * self._max_bytes].decode("utf-8", "ignore") + "\n[... cut ...]"


async def _answer(process: SandboxProcess) -> bytes | None:
    """The next answer; ``None`` when the process ended before it gave one. Raises :class:`SandboxError`."""
    data = b""
    while b"\n" not in data:
        part = await process.read()
        if not part:
            return None
        data += part
    length, _, rest = data.partition(b"\n")
    if not length.isdigit() or int(length) > _ANSWER_BYTES:
        raise SandboxError(f"the answer of the database's process cannot be read: it begins with {length[:20]!r}")
    parts, left = [rest], int(length) - len(rest)
    while left > 0:
        part = await process.read()
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _flat(cell: Any) -> str:
    return str(cell).replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r") if "\n" in str(cell) else str(cell)


def _value(cell: Any) -> Any:
    return base64.b64decode(cell["bytes"]) if isinstance(cell, dict) else cell


def database(content: str | bytes | Path) -> bytes:
    """The bytes of a database file with ``content``: a script, a file of either kind, or those bytes themselves."""
    if isinstance(content, Path):
        try:
            content = content.read_bytes()
        except OSError as error:
            raise ConfigError(f"the database's content cannot be read: {error}") from error
        if not content.startswith(_MAGIC):
            content = content.decode()
    if isinstance(content, bytes):
        if not content.startswith(_MAGIC):
            raise ConfigError("these bytes are no SQLite database; give a script as str")
        return content
    return _made(content)


@lru_cache(maxsize=64)
def _made(script: str) -> bytes:
    """The database that ``script`` makes: one build for all episodes of a task."""
    connection = sqlite3.connect(":memory:")
    try:
        connection.executescript(script)
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        connection.execute(f"PRAGMA user_version={version}")  # writes the header, which a database without tables lacks
        return connection.serialize()
    except sqlite3.Error as error:
        raise ConfigError(f"the script of the database fails: {error}") from error
    finally:
        connection.close()
