"""What runs inside the sandbox for :class:`sandboxes.tools.sql.Sql`, in any Python from 3.7 on, its library only.

Requests come on standard input and answers go to standard output, each as a line with its length, then JSON. The
statements come from a model: an authorizer keeps them to their own database, and SQLite's own limits bound their time
and memory, so that what is too much ends with a sentence and not with the death of this process.

The database is opened for every request, since its file may have been replaced, and kept open only for as long as a
transaction is.
"""

from __future__ import annotations

import binascii
import json
import sqlite3
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # a module that takes longer to load than most queries
    from typing import Any

# Pragmas that only tell, and one setting that concerns nobody but the connection.
_PRAGMAS = {
    "collation_list",
    "compile_options",
    "data_version",
    "database_list",
    "encoding",
    "foreign_key_check",
    "foreign_key_list",
    "foreign_keys",
    "function_list",
    "index_info",
    "index_list",
    "index_xinfo",
    "integrity_check",
    "page_count",
    "page_size",
    "quick_check",
    "table_info",
    "table_list",
    "table_xinfo",
    "user_version",
}
_MODULES = {"fts5", "rtree"}
_FUNCTIONS_REFUSED = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}
_STEPS = 1000  # of SQLite's virtual machine between two looks at the clock
_VTABLES = {29, 30}  # SQLITE_CREATE_VTABLE, SQLITE_DROP_VTABLE
_RESULTS_TOLD = 50
_BUSY_SECONDS = 5.0  # how long one waits for others who write
# Number of the limit in SQLite's C interface, and its value here.
_LIMITS = {1: 100_000, 2: 200, 3: 200, 4: 100, 6: 100, 7: 0, 8: 1000, 10: 100, 11: 0}


class Server:
    """Answers one request after another. ``held``: where a transaction is open."""

    def __init__(self) -> None:
        self.held: sqlite3.Connection | None = None
        self.lost = False  # a transaction was rolled back, which its owner does not know yet

    def serve(self) -> None:
        """Until nothing more comes."""
        requests, answers = sys.stdin.buffer, sys.stdout.buffer
        while True:
            length = requests.readline()
            if not length:
                return
            request = json.loads(requests.read(int(length)))
            try:
                data = _encoded(self.answer(request))
            except MemoryError:
                self.roll_back()
                data = _encoded({"results": [], "error": "out of memory"})
            if len(data) > request["answer_bytes"]:
                data = _encoded({"results": [], "error": "too large", "open": self.held is not None})
            answers.write(b"%d\n" % len(data) + data)
            answers.flush()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What ``request["query"]`` brings. With ``apart``, outside any transaction, which may have to go for it."""
        if request["apart"]:
            reply = _alone(request, 0.0 if self.held is not None else _BUSY_SECONDS)
            if self.held is not None and "database is locked" in reply.get("error", ""):
                self.roll_back()
                reply = _alone(request, _BUSY_SECONDS)
            return reply
        was_open = self.held is not None
        connection = self.held if self.held is not None else _opened(request, _BUSY_SECONDS)
        self.held = None
        _guard(connection, request)
        reply = _ran(connection, request)
        if connection.in_transaction:
            self.held = connection
        else:
            connection.close()
        reply["open"] = self.held is not None
        reply["rolled_back"] = self.lost or (was_open and self.held is None and "error" in reply)
        self.lost = False
        return reply

    def roll_back(self) -> None:
        """Give the open transaction up, if there is one."""
        if self.held is not None:
            self.held.close()  # which rolls back
            self.held, self.lost = None, True


def _encoded(reply: dict[str, Any]) -> bytes:
    return json.dumps(reply, ensure_ascii=False).encode("utf-8", "replace")


def _alone(request: dict[str, Any], busy_seconds: float) -> dict[str, Any]:
    connection = _opened(request, busy_seconds)
    _guard(connection, request)
    try:
        return _ran(connection, request)
    finally:
        connection.close()


def _ran(connection: sqlite3.Connection, request: dict[str, Any]) -> dict[str, Any]:
    """``results``: what the first statements brought; ``error``: what ended it."""
    results: list[dict[str, Any]] = []
    reply: dict[str, Any] = {"results": results, "untold": 0}
    room = int(request["max_bytes"])
    try:
        for statement in _statements(request["query"]):
            result, used = _result(connection.execute(statement, request["parameters"]), request, room)
            room -= used
            if len(results) < _RESULTS_TOLD:
                results.append(result)
            else:
                reply["untold"] += 1
    except MemoryError:
        reply["error"] = "out of memory"
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        reply["error"] = str(error)
    return reply


def _opened(request: dict[str, Any], busy_seconds: float) -> sqlite3.Connection:
    mode = "ro" if request["read_only"] else "rwc"
    path = request["path"].replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    connection = sqlite3.connect(f"file:{path}?mode={mode}", busy_seconds, uri=True, isolation_level=None)
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    connection.execute(f"PRAGMA hard_heap_limit={int(request['memory_bytes'])}")
    connection.execute("PRAGMA temp_store=MEMORY")
    connection.execute("PRAGMA trusted_schema=OFF")
    if request["read_only"]:
        connection.execute("PRAGMA query_only=ON")
    if hasattr(connection, "setlimit"):  # from Python 3.11 on
        connection.setlimit(0, int(request["value_bytes"]))
        for number, value in _LIMITS.items():
            connection.setlimit(number, value)
    connection.set_authorizer(_allowed)
    return connection


def _guard(connection: sqlite3.Connection, request: dict[str, Any]) -> None:
    """Stop what it runs once its time is over."""
    deadline = time.monotonic() + float(request["seconds"])
    connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)


def _allowed(action: int, first: str | None, second: str | None, _database: str | None, _trigger: str | None) -> int:
    refused = (
        action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH)
        or (action == sqlite3.SQLITE_PRAGMA and (first or "").lower() not in _PRAGMAS)
        or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FUNCTIONS_REFUSED)
        or (action in _VTABLES and (second or "").lower() not in _MODULES)
    )
    return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK


def _statements(script: str) -> list[str]:
    """The statements of a script, each with its semicolon; what is not complete comes last."""
    found: list[str] = []
    start = end = 0
    while (end := script.find(";", end) + 1) > 0:
        if sqlite3.complete_statement(script[start:end]):
            found.append(script[start:end])
            start = end
    if script[start:].strip():
        found.append(script[start:])
    return found


def _result(cursor: sqlite3.Cursor, request: dict[str, Any], room: int) -> tuple[dict[str, Any], int]:
    """What a statement brought, rows only as far as there is room for their characters, and how much that takes."""
    if cursor.description is None:
        return {"changed": cursor.rowcount}, 0
    rows: list[list[Any]] = []
    used = 0
    more = False
    width = None if request["exact"] else int(request["max_cell"])
    for row in cursor:
        cells = [_cell(value, width) for value in row]
        used += sum(len(str(cell)) for cell in cells)
        if len(rows) >= request["max_rows"] or (rows and used > room):
            more = True
            break
        rows.append(cells)
    return {"columns": [str(column[0])[:200] for column in cursor.description], "rows": rows, "more": more}, used


def _cell(value: Any, width: int | None) -> Any:
    """A value as it is (``width`` is ``None``; bytes in base 64), or as text of at most ``width`` characters."""
    if width is None:
        return {"bytes": binascii.b2a_base64(value, newline=False).decode()} if isinstance(value, bytes) else value
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        shown = value[: width // 2].hex()
        return f"x'{shown}'" if len(value) <= width // 2 else f"x'{shown}...' ({len(value)} bytes)"
    text = str(value)
    return text if len(text) <= width else f"{text[:width]}... ({len(text)} characters)"


if __name__ == "__main__":
    Server().serve()
