"""What runs inside the sandbox for one call of :class:`sandboxes.tools.sql.Sql`. Stands alone: Python's library only.

Reads a request as JSON from standard input and answers with JSON on standard output. The statements come from a model:
an authorizer keeps them to their own database, and SQLite's own limits bound their time and memory, so that what is
too much ends with a sentence and not with the death of this process.
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
# Number of the limit in SQLite's C interface, and its value here.
_LIMITS = {1: 100_000, 2: 200, 3: 200, 4: 100, 6: 100, 7: 0, 8: 1000, 10: 100, 11: 0}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run ``request["query"]``. ``results``: what the first statements brought; ``error``: what ended it."""
    results: list[dict[str, Any]] = []
    reply: dict[str, Any] = {"results": results, "untold": 0}
    room = int(request["max_bytes"])
    connection = _opened(request)
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
    reply["rolled_back"] = connection.in_transaction
    if connection.in_transaction:
        connection.rollback()
    connection.close()
    return reply


def _opened(request: dict[str, Any]) -> sqlite3.Connection:
    mode = "ro" if request["read_only"] else "rwc"
    path = request["path"].replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    connection = sqlite3.connect(f"file:{path}?mode={mode}", uri=True, isolation_level=None)
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
    deadline = time.monotonic() + float(request["seconds"])
    connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
    connection.set_authorizer(_allowed)
    return connection


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
    json.dump(answer(json.load(sys.stdin)), sys.stdout, ensure_ascii=False)
