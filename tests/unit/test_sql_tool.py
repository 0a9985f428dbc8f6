"""SQL that models write: what it shows, and what it cannot do."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfarm.core.environment import Environment
from envfarm.core.errors import ConfigError, IsolationError, ToolError
from envfarm.core.sandbox import SandboxProfile
from sandboxes.isolation.bwrap import python
from sandboxes.isolation.sandbox import slot_sandbox
from sandboxes.tools.interpreter import interpreter
from sandboxes.tools.sql import Sql, database
from sandboxes.tools.sql_inside import _statements

SHOP = """
CREATE TABLE item (name TEXT PRIMARY KEY, price REAL, stock INTEGER NOT NULL DEFAULT 0);
CREATE TABLE sale (item TEXT REFERENCES item (name), units INTEGER);
CREATE INDEX sale_item ON sale (item);
INSERT INTO item VALUES ('apple', 1.5, 10), ('pear', NULL, 3);
INSERT INTO sale VALUES ('apple', 2), ('apple', 5);
"""
ENDLESS = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r)"


@pytest.fixture
def make(slot):
    async def filled(content: Any = SHOP, **arguments: Any) -> Sql:
        made = Sql(content, **arguments)
        made.sandbox = slot
        await made.reset()
        return made

    return filled


@pytest.fixture
async def sql(make):
    return await make()


# What a model sees


async def test_rows_are_shown_as_a_table_with_their_number(sql):
    text = await sql.execute_sql("SELECT name, price FROM item ORDER BY name")
    assert text == "name | price\n--- | ---\napple | 1.5\npear | NULL\n(2 rows)"


async def test_a_change_says_how_many_rows_and_lasts(sql):
    assert await sql.execute_sql("UPDATE item SET stock = stock + 1 WHERE price IS NOT NULL") == "OK, 1 row changed"
    assert "\n11\n" in await sql.execute_sql("SELECT stock FROM item WHERE name = 'apple'")


async def test_several_statements_show_what_each_of_them_brought(sql):
    text = await sql.execute_sql("CREATE TABLE t (a); INSERT INTO t VALUES (';'), (2); SELECT count(*) AS n FROM t")
    assert text == "OK\n\nOK, 2 rows changed\n\nn\n---\n2\n(1 row)"


async def test_semicolons_inside_a_trigger_a_text_or_a_comment_end_no_statement(sql):
    text = await sql.execute_sql(
        "CREATE TRIGGER t AFTER INSERT ON sale BEGIN UPDATE item SET stock = 0; DELETE FROM item WHERE stock > 5; END; "
        "-- one; two\nINSERT INTO sale VALUES ('a;b', 1); /* ; */ SELECT 'x;y' AS t"
    )
    assert text == "OK\n\nOK, 1 row changed\n\nt\n---\nx;y\n(1 row)"


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="ab;'\"-*/\n ", max_size=40))
def test_a_script_is_the_sum_of_its_statements(script):
    statements = _statements(script)
    assert script.startswith("".join(statements))
    assert not script[len("".join(statements)) :].strip()


async def test_an_error_has_the_message_of_sqlite_and_keeps_what_ran_before_it(sql):
    with pytest.raises(ToolError, match="error: no such table: items"):
        await sql.execute_sql("SELECT * FROM items")
    with pytest.raises(ToolError, match='near "SELEC": syntax error'):
        await sql.execute_sql("SELEC 1")
    text = await sql.execute_sql("SELECT 1 AS one; SELECT nil")
    assert text == "one\n---\n1\n(1 row)\n\nerror: no such column: nil"


async def test_many_rows_and_wide_values_are_cut_with_a_notice(make):
    sql = await make(max_rows=5, max_cell=10)
    text = await sql.execute_sql(f"{ENDLESS} SELECT x FROM r LIMIT 100")
    assert "[... more rows follow; only the first 5 are shown" in text
    text = await sql.execute_sql("SELECT hex(zeroblob(50)) AS h, zeroblob(1000) AS b")
    assert "0000000000... (100 characters) | x'0000000000...' (1000 bytes)" in text


async def test_what_is_shown_is_bounded_however_much_a_query_brings(make):
    sql = await make(max_bytes=1000)
    wide = ", ".join(f"hex(zeroblob(100)) AS c{i}" for i in range(100))
    many = "SELECT hex(zeroblob(90));" * 200
    for query in (f"{ENDLESS} SELECT {wide} FROM r LIMIT 500", many, "SELECT 1;" * 5000):
        assert len(await sql.execute_sql(query)) < 2100


async def test_text_with_line_ends_stays_in_its_row(sql):
    assert "\na\\nb | x'00ff'\n" in await sql.execute_sql("SELECT 'a' || char(10) || 'b' AS t, x'00ff' AS b")


async def test_text_that_is_no_utf_8_is_shown_all_the_same(sql):
    assert "\ufffd" in await sql.execute_sql("SELECT CAST(x'ff41' AS TEXT)")


async def test_the_schema_shows_how_tables_were_made(sql):
    text = await sql.get_schema()
    assert text.startswith("CREATE TABLE item (name TEXT PRIMARY KEY")
    assert text.endswith("CREATE INDEX sale_item ON sale (item);")
    assert await sql.get_schema("SALE") == (
        "CREATE TABLE sale (item TEXT REFERENCES item (name), units INTEGER);\nCREATE INDEX sale_item ON sale (item);"
    )
    with pytest.raises(ToolError, match="there is no table 'x'"):
        await sql.get_schema("x")


async def test_pragmas_that_only_tell_and_full_text_search_are_there(sql):
    assert "name | TEXT" in await sql.execute_sql("PRAGMA table_info(item)")
    assert "SCAN" in await sql.execute_sql("EXPLAIN QUERY PLAN SELECT * FROM item")
    text = await sql.execute_sql(
        "CREATE VIRTUAL TABLE note USING fts5(body); INSERT INTO note VALUES ('red apple'); "
        "SELECT body FROM note WHERE note MATCH 'apple'"
    )
    assert "red apple" in text


# Transactions


async def test_a_transaction_spans_calls_until_it_is_committed_or_rolled_back(sql):
    assert "a transaction is open: COMMIT keeps" in await sql.execute_sql("BEGIN; DELETE FROM sale")
    assert "\n0\n" in await sql.execute_sql("SELECT count(*) FROM sale")
    assert await sql.execute_sql("ROLLBACK") == "OK"
    assert await sql.rows("SELECT count(*) FROM sale") == [(2,)]
    await sql.execute_sql("BEGIN; DELETE FROM sale")
    assert await sql.execute_sql("COMMIT") == "OK"
    assert await sql.rows("SELECT count(*) FROM sale") == [(0,)]


async def test_an_error_within_a_transaction_leaves_it_open(sql):
    await sql.execute_sql("BEGIN; DELETE FROM sale")
    with pytest.raises(ToolError, match=r"(?s)no such table.*a transaction is open"):
        await sql.execute_sql("SELECT * FROM absent")
    await sql.execute_sql("COMMIT")
    assert await sql.rows("SELECT count(*) FROM sale") == [(0,)]


async def test_tables_of_an_open_transaction_are_in_the_schema(sql):
    await sql.execute_sql("BEGIN; CREATE TABLE fresh (a)")
    assert "CREATE TABLE fresh" in await sql.get_schema()
    assert await sql.rows("SELECT name FROM sqlite_schema WHERE name = 'fresh'") == []


@pytest.mark.parametrize("begin", ["BEGIN EXCLUSIVE", "BEGIN; UPDATE item SET stock = 0"])
async def test_an_environment_reads_what_was_committed_whatever_the_model_left_open(make, begin):
    sql = await make()
    await sql.execute_sql(begin)
    started = time.monotonic()
    assert await sql.rows("SELECT sum(stock) FROM item") == [(13,)]
    assert time.monotonic() - started < 3.0


async def test_a_transaction_that_kept_the_environment_from_reading_is_rolled_back_and_that_is_told(sql):
    await sql.execute_sql("BEGIN EXCLUSIVE; DELETE FROM item")
    assert await sql.rows("SELECT count(*) FROM item") == [(2,)]
    text = await sql.execute_sql("SELECT count(*) AS n FROM item")
    assert text == "n\n---\n2\n(1 row)\n\n[... the transaction that was open has been rolled back ...]"
    assert "rolled back" not in await sql.execute_sql("SELECT 1")


async def test_a_transaction_that_ends_with_its_process_is_rolled_back_and_that_is_told(sql, slot):
    await sql.execute_sql("BEGIN; DELETE FROM item")
    await asyncio.to_thread(slot.end_sessions)
    assert "has been rolled back" in await sql.execute_sql("SELECT count(*) FROM item")
    assert await sql.rows("SELECT count(*) FROM item") == [(2,)]


async def test_a_query_that_is_stopped_takes_its_transaction_along_and_that_is_told(make):
    sql = await make(seconds=0.3)
    await sql.execute_sql("BEGIN; DELETE FROM sale")
    with pytest.raises(ToolError, match=r"(?s)stopped after 0\.3 s.*has been rolled back"):
        await sql.execute_sql(f"INSERT INTO sale {ENDLESS} SELECT x, x FROM r")
    assert await sql.rows("SELECT count(*) FROM sale") == [(2,)]


async def test_a_transaction_ends_with_its_episode(sql):
    await sql.execute_sql("BEGIN; DELETE FROM item")
    await sql.reset()
    assert "rolled back" not in await sql.execute_sql("SELECT 1")
    assert await sql.rows("SELECT count(*) FROM item") == [(2,)]


# Its process


async def test_one_process_serves_all_calls(sql):
    await sql.execute_sql("SELECT 1")
    first = sql._kept.running
    await sql.get_schema()
    await sql.rows("SELECT 1")
    assert sql._kept.running is first


async def test_a_file_that_others_put_in_its_place_is_the_database_from_then_on(sql, slot):
    await sql.execute_sql("SELECT 1")
    await slot.write("other", database("CREATE TABLE other (a); INSERT INTO other VALUES (7)"))
    assert (await slot.exec(["mv", "other", "database.sqlite"])).exit_code == 0
    assert "\n7\n" in await sql.execute_sql("SELECT a FROM other")


async def test_a_process_that_was_ended_is_started_again(sql, slot):
    await sql.execute_sql("SELECT 1")
    await asyncio.to_thread(slot.end_sessions)
    assert await sql.rows("SELECT 2") == [(2,)]


async def test_what_is_too_large_to_hand_over_is_refused_and_the_next_call_is_answered(sql):
    with pytest.raises(ToolError, match="the result is too large; select less"):
        await sql.rows("SELECT " + ", ".join("hex(zeroblob(400000))" for _ in range(8)))
    assert await sql.rows("SELECT 1") == [(1,)]


async def test_calls_at_once_are_answered_one_after_the_other(sql):
    answers = await asyncio.gather(*(sql.rows(f"SELECT {i}") for i in range(20)))
    assert answers == [[(i,)] for i in range(20)]


async def test_a_call_that_is_given_up_spoils_no_later_one(make):
    sql = await make(seconds=4.0)
    call = asyncio.create_task(sql.execute_sql(f"{ENDLESS} SELECT count(*) FROM r"))
    async with asyncio.timeout(10):
        while sql._kept.running is None:  # noqa: ASYNC110 - the call makes it so
            await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await sql.rows("SELECT 5") == [(5,)]


# What it holds


async def test_an_episode_begins_with_the_content_whatever_the_last_one_did(make, sql):
    await sql.execute_sql("DROP TABLE sale; DELETE FROM item")
    await sql.reset()
    assert "\n7\n" in await sql.execute_sql("SELECT sum(units) FROM sale")


async def test_content_may_be_a_script_a_file_of_either_kind_or_bytes(make, tmp_path: Path):
    script = tmp_path / "shop.sql"
    script.write_text(SHOP)
    file = tmp_path / "shop.db"
    with sqlite3.connect(file) as connection:
        connection.executescript(SHOP)
    connection.close()
    for content in (SHOP, script, file, file.read_bytes()):
        sql = await make(content)
        assert await sql.rows("SELECT name FROM item ORDER BY name") == [("apple",), ("pear",)]


async def test_an_environment_fills_it_anew_and_reads_values_as_they_are(sql):
    await sql.fill("CREATE TABLE t (a, b, c, d); INSERT INTO t VALUES (1, 2.5, NULL, x'00ff')")
    assert await sql.rows("SELECT * FROM t WHERE a = ?", [1]) == [(1, 2.5, None, b"\0\xff")]
    with pytest.raises(ToolError, match="no such table: item"):
        await sql.rows("SELECT * FROM item")


async def test_nothing_given_is_an_empty_database(make):
    sql = await make("")
    assert await sql.get_schema() == "The database is empty."
    assert await sql.execute_sql("CREATE TABLE t (a)") == "OK"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("CREATE TABLE", "script of the database fails: incomplete input"),
        (b"junk", "no SQLite"),
        (Path("/none"), "read"),
    ],
)
def test_content_that_makes_no_database_is_told_to_its_author(content, told):
    with pytest.raises(ConfigError, match=told):
        database(content)


# What it cannot do


async def test_a_read_only_database_stays_as_it_is(make):
    sql = await make(read_only=True)
    for query in ("DELETE FROM item", "CREATE TABLE t (a)", "DROP TABLE item", "UPDATE item SET stock = 0"):
        with pytest.raises(ToolError, match="the database is read-only here"):
            await sql.execute_sql(query)
    with pytest.raises(ToolError, match="not authorized"):
        await sql.execute_sql("PRAGMA query_only = OFF")
    assert await sql.rows("SELECT sum(stock) FROM item") == [(13,)]


@pytest.mark.parametrize(
    "query",
    [
        "ATTACH DATABASE 'other.db' AS other",
        "ATTACH DATABASE ':memory:' AS other",
        "VACUUM INTO 'copy.db'",
        "SELECT load_extension('evil')",
        "SELECT readfile('/etc/passwd')",
        "SELECT writefile('x', 'y')",
        "PRAGMA hard_heap_limit = 0",
        "PRAGMA journal_mode = WAL",
        "PRAGMA temp_store_directory = '/tmp'",
        "PRAGMA writable_schema = ON",
        "CREATE VIRTUAL TABLE t USING csv(filename='/etc/passwd')",
        "SELECT randomblob(1000000000)",
        "SELECT " + "(" * 3000 + "1" + ")" * 3000,
        "SELECT 1" + " UNION ALL SELECT 1" * 5000,
        "CREATE TABLE t (" + ", ".join(f"c{i}" for i in range(3000)) + ")",
        "SELECT 1 WHERE 'a' LIKE '" + "%a" * 5000 + "'",
    ],
    ids=lambda query: query[:40],
)
async def test_statements_that_reach_further_are_refused_and_leave_nothing(sql, slot, query):
    with pytest.raises(ToolError, match="error: "):
        await sql.execute_sql(query)
    for name in ("other.db", "copy.db", "x"):
        with pytest.raises(ToolError):
            await slot.read(name)
    assert await sql.rows("SELECT count(*) FROM item") == [(2,)]


@pytest.mark.parametrize(
    "query",
    [
        f"{ENDLESS} SELECT count(*) FROM r",
        f"CREATE TABLE big AS {ENDLESS} SELECT x, x AS y FROM r",
        "SELECT count(*) FROM " + ", ".join(f"(SELECT 1 UNION SELECT 2 UNION SELECT 3) t{i}" for i in range(40)),
    ],
)
async def test_a_query_without_end_is_stopped_at_its_time_and_the_database_goes_on(make, query):
    sql = await make(seconds=0.5)
    started = time.monotonic()
    with pytest.raises(ToolError, match=r"stopped after 0\.5 s|disk|memory|full"):
        await sql.execute_sql(query)
    assert time.monotonic() - started < 5.0
    assert await sql.rows("SELECT count(*) FROM item") == [(2,)]


async def test_a_query_that_eats_memory_ends_with_a_sentence(make):
    sql = await make(memory_bytes=16 * 2**20)
    with pytest.raises(ToolError, match="needs more than the 16 MiB of memory"):
        await sql.execute_sql(f"{ENDLESS}, big AS (SELECT randomblob(900000) AS b FROM r LIMIT 500) "
                              "SELECT count(*) FROM (SELECT b FROM big ORDER BY b)")  # fmt: skip


async def test_a_query_beyond_all_size_is_refused_before_it_runs(sql):
    with pytest.raises(ToolError, match="at most 100000 are allowed"):
        await sql.execute_sql("SELECT 1;" * 20_000)


async def test_a_database_that_was_tampered_with_is_an_error_and_not_a_crash(sql, slot):
    await slot.write("database.sqlite", b"SQLite format 3\0" + b"\xff" * 5000)
    with pytest.raises(ToolError, match="error: "):
        await sql.execute_sql("SELECT * FROM item")


@pytest.mark.parametrize("missing", ["/nowhere/python3", "python-that-is-not-there"])
async def test_an_image_without_python_is_the_fault_of_nobody_who_plays(sql, monkeypatch, missing):
    monkeypatch.setattr("sandboxes.tools.sql.interpreter", lambda toolset: missing)
    with pytest.raises(IsolationError, match="Sql needs Python inside the sandbox"):
        await sql.execute_sql("SELECT 1")


def test_with_an_image_its_own_python_is_asked_for():
    class Boxed(Environment):
        """Runs in an image."""

        profile = SandboxProfile(image="python:3.12")
        toolsets = (Sql(),)

    class Unboxed(Environment):
        """Runs in the host's system."""

        toolsets = (Sql(),)

    made = [cls() for cls in (Boxed, Unboxed)]
    for environment in made:
        environment.equip(None)  # type: ignore[arg-type]
    assert [interpreter(environment.toolset(Sql)) for environment in made] == ["python3", python()]


async def test_two_slots_have_a_database_each(slot_ground, sql):
    other = Sql(SHOP)
    other.sandbox = slot_sandbox(slot_ground, 8, SandboxProfile())
    try:
        await other.reset()
        await sql.execute_sql("DELETE FROM item")
        assert await other.rows("SELECT count(*) FROM item") == [(2,)]
    finally:
        other.sandbox.close()  # type: ignore[attr-defined]
