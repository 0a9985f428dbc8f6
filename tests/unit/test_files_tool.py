"""The editor and the searches that models use on files."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfarm.core.errors import ToolError
from sandboxes.tools import search
from sandboxes.tools.files import Files
from sandboxes.tools.mismatch import explanation
from sandboxes.tools.text import Text, numbered, occurrences


@pytest.fixture
def folder(slot) -> Path:
    """The working folder of a real slot, as the host sees it."""
    return slot._workspace.path


@pytest.fixture
def files_in(slot):
    def made_with(**arguments: int) -> Files:
        made = Files(**arguments)
        made.sandbox = slot
        return made

    return made_with


@pytest.fixture
def files(files_in) -> Files:
    return files_in()


PROGRAM = b"def add(a, b):\n    return a - b\n\n\ndef sub(a, b):\n    return a - b\n"


# View


async def test_a_view_numbers_lines_as_cat_does(files, folder):
    (folder / "a.txt").write_bytes(b"one\ntwo\n")
    assert await files.str_replace_editor("view", "a.txt") == "a.txt, lines 1-2 of 2:\n     1\tone\n     2\ttwo"


async def test_a_view_shows_the_asked_range_and_minus_one_means_the_end(files, folder):
    (folder / "a.txt").write_text("".join(f"line {i}\n" for i in range(1, 11)))
    assert "     3\tline 3\n     4\tline 4" in await files.str_replace_editor("view", "a.txt", view_range=[3, 4])
    to_end = await files.str_replace_editor("view", "a.txt", view_range=[9, -1])
    assert to_end == "a.txt, lines 9-10 of 10:\n     9\tline 9\n    10\tline 10"


@pytest.mark.parametrize("view_range", [[0, 2], [4, 5], [3, 2], [-1, -1]])
async def test_a_range_that_is_not_in_the_file_is_told_with_the_number_of_lines(files, folder, view_range):
    (folder / "a.txt").write_text("one\ntwo\nthree\n")
    with pytest.raises(ToolError, match="the file has 3 lines"):
        await files.str_replace_editor("view", "a.txt", view_range=view_range)


async def test_a_long_file_is_cut_with_the_range_to_ask_for_next(folder, files_in):
    (folder / "a.txt").write_text("".join(f"{i}\n" for i in range(1, 101)))
    text = await files_in(max_lines=10).str_replace_editor("view", "a.txt")
    assert text.startswith("a.txt, lines 1-10 of 100:")
    assert "use view_range=[11, 100]" in text
    text = await files_in(max_bytes=50).str_replace_editor("view", "a.txt", view_range=[50, 80])
    assert text.startswith("a.txt, lines 50-5")
    assert "view_range=[5" in text
    assert len(text) < 250


async def test_a_very_long_line_is_cut_and_says_by_how_much(folder, files_in):
    (folder / "a.txt").write_text("x" * 5000 + "\nshort\n")
    text = await files_in(max_line=100).str_replace_editor("view", "a.txt")
    assert "[... 4900 characters cut ...]" in text
    assert text.endswith("     2\tshort")


async def test_a_file_larger_than_can_be_edited_is_viewed_in_part_and_not_edited(folder, files_in):
    (folder / "big.txt").write_bytes(b"0123456789\n" * 1000)
    files = files_in(max_file_bytes=1000)
    assert "larger than the 1000 bytes" in await files.str_replace_editor("view", "big.txt", view_range=[1, 2])
    with pytest.raises(ToolError, match="larger than the 1000 bytes that can be edited"):
        await files.str_replace_editor("str_replace", "big.txt", old_str="0", new_str="1")


async def test_a_binary_file_is_neither_shown_nor_edited(files, folder):
    (folder / "a.bin").write_bytes(b"\x7fELF\0\0\1")
    with pytest.raises(ToolError, match=r"a\.bin is a binary file \(7 bytes\)"):
        await files.str_replace_editor("view", "a.bin")
    with pytest.raises(ToolError, match="cannot be edited"):
        await files.str_replace_editor("insert", "a.bin", insert_line=0, new_str="x")


async def test_a_view_of_a_folder_lists_two_levels_without_hidden_ones(files, folder):
    for name in ("src/app/deep.py", "src/main.py", "README.md", ".git/config"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    text = await files.str_replace_editor("view", ".")
    assert text == "README.md\nsrc/\nsrc/app/\nsrc/main.py\n[... hidden ones are left out ...]"
    assert "src/app/deep.py" in await files.str_replace_editor("view", "src/")


async def test_an_empty_file_and_a_missing_one_are_told_apart(files, folder):
    (folder / "a.txt").write_bytes(b"")
    assert await files.str_replace_editor("view", "a.txt") == "a.txt is empty."
    with pytest.raises(ToolError, match="no such file or folder"):
        await files.str_replace_editor("view", "b.txt")


# Create


async def test_create_writes_what_was_given_and_says_whether_it_overwrote(files, folder):
    assert "has been created (2 lines)" in await files.str_replace_editor("create", "x/a.txt", file_text="one\ntwo")
    assert (folder / "x/a.txt").read_bytes() == b"one\ntwo"
    assert "overwritten (1 line)" in await files.str_replace_editor("create", "x/a.txt", file_text="y\n")


@pytest.mark.parametrize(
    ("command", "missing"), [("create", "file_text"), ("str_replace", "old_str"), ("insert", "insert_line")]
)
async def test_a_command_says_which_argument_it_lacks(files, command, missing):
    with pytest.raises(ToolError, match=f"{command} needs {missing}"):
        await files.str_replace_editor(command, "a.txt")


# Replace


async def test_a_replacement_changes_one_place_and_shows_it(files, folder):
    (folder / "a.py").write_bytes(PROGRAM)
    text = await files.str_replace_editor(
        "str_replace", "a.py", old_str="def add(a, b):\n    return a - b", new_str="def add(a, b):\n    return a + b"
    )
    assert "     2\t    return a + b" in text
    assert (folder / "a.py").read_bytes() == PROGRAM.replace(b"a - b", b"a + b", 1)


async def test_several_occurrences_are_told_with_their_lines_and_nothing_changes(files, folder):
    (folder / "a.py").write_bytes(PROGRAM)
    with pytest.raises(ToolError, match=r"more than once in a\.py: it begins at lines 2, 6"):
        await files.str_replace_editor("str_replace", "a.py", old_str="return a - b", new_str="return 0")
    assert (folder / "a.py").read_bytes() == PROGRAM


async def test_overlapping_occurrences_are_ambiguous_too(files, folder):
    (folder / "a.txt").write_text("aaa\n")
    with pytest.raises(ToolError, match="more than once"):
        await files.str_replace_editor("str_replace", "a.txt", old_str="aa", new_str="b")


@pytest.mark.parametrize(
    ("content", "old", "told"),
    [
        (
            b"if x:\n\treturn 1\n",
            "if x:\n    return 1",
            r"only in whitespace from lines 1-2 \(the file indents with tabs",
        ),
        (b"a = 1  \nb = 2\n", "a = 1\nb = 2", r"only in whitespace from lines 1-2 \(at the ends of lines"),
        (b"  a = 1\n", "    a = 1", r"only in whitespace from line 1 \(the indentation"),
        (b"a=1\n", "a = 1", r"only in whitespace from line 1 \(between words"),
        (b"x\nvalue = compute(3)\n", "value = compute(4)", "closest lines are:\n     2\tvalue = compute"),
        (b"one\ntwo\n", "     1\tone\n     2\ttwo", "leave numbers and tabs out"),
        (b"one\n", "completely different", "No line of the file is like it"),
    ],
)
async def test_a_text_that_is_not_there_is_explained_and_nothing_changes(files, folder, content, old, told):
    (folder / "a.txt").write_bytes(content)
    with pytest.raises(ToolError, match=told) as caught:
        await files.str_replace_editor("str_replace", "a.txt", old_str=old, new_str="new")
    assert str(caught.value).startswith("error: nothing was replaced")
    assert (folder / "a.txt").read_bytes() == content


async def test_an_edit_keeps_crlf_and_a_missing_end_of_the_last_line(files, folder):
    (folder / "a.txt").write_bytes(b"one\r\ntwo\r\nthree")
    await files.str_replace_editor("str_replace", "a.txt", old_str="one\ntwo", new_str="1\n2\n2.5")
    assert (folder / "a.txt").read_bytes() == b"1\r\n2\r\n2.5\r\nthree"
    await files.str_replace_editor("insert", "a.txt", insert_line=4, new_str="four\n")
    assert (folder / "a.txt").read_bytes() == b"1\r\n2\r\n2.5\r\nthree\r\nfour"


async def test_an_edit_keeps_bytes_that_are_not_utf_8(files, folder):
    (folder / "latin.txt").write_bytes(b"caf\xe9\nprice 3\n")
    assert "caf\ufffd" in await files.str_replace_editor("view", "latin.txt")
    await files.str_replace_editor("str_replace", "latin.txt", old_str="price 3", new_str="prix 3 €")
    assert (folder / "latin.txt").read_bytes() == b"caf\xe9\nprix 3 \xe2\x82\xac\n"


async def test_an_edit_that_changes_nothing_is_told(files, folder):
    (folder / "a.txt").write_text("x\n")
    with pytest.raises(ToolError, match="the same"):
        await files.str_replace_editor("str_replace", "a.txt", old_str="x", new_str="x")
    with pytest.raises(ToolError, match="old_str is empty"):
        await files.str_replace_editor("str_replace", "a.txt", old_str="", new_str="x")


def test_an_explanation_takes_bounded_time_however_long_and_similar_the_lines_are():
    lines = [f"{'abcdefghij' * 19} {i}" for i in range(200_000)]
    started = time.monotonic()
    assert "closest" in explanation(lines, "abcdefghij" * 19 + "?", 100)
    assert time.monotonic() - started < 5.0


# Insert


@pytest.mark.parametrize(
    ("after", "expected"), [(0, "new\none\ntwo\n"), (1, "one\nnew\ntwo\n"), (2, "one\ntwo\nnew\n")]
)
async def test_lines_are_inserted_behind_the_line_that_is_named(files, folder, after, expected):
    (folder / "a.txt").write_text("one\ntwo\n")
    await files.str_replace_editor("insert", "a.txt", insert_line=after, new_str="new")
    assert (folder / "a.txt").read_text() == expected


async def test_a_line_that_is_not_there_is_told_with_those_that_are(files, folder):
    (folder / "a.txt").write_text("one\n")
    with pytest.raises(ToolError, match="insert_line is 5, but the file has 1 lines; give a number from 0"):
        await files.str_replace_editor("insert", "a.txt", insert_line=5, new_str="x")


CONTENTS = st.text(alphabet="ab \t\n\r\x0c\u2028é", max_size=60)


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=80) | CONTENTS.map(str.encode))
def test_what_is_read_is_written_back_byte_for_byte(data):
    assert Text.decode(data).encode() == data


@settings(deadline=None, max_examples=150)
@given(CONTENTS.filter(bool), CONTENTS.filter(bool), st.data())
def test_inserting_changes_lines_and_nothing_else(content, new, data):
    text = Text(content)
    after = data.draw(st.integers(0, len(text.lines)))
    edited = text.inserted(after, new)
    added = Text(new).lines
    assert edited.lines == text.lines[:after] + added + text.lines[after:]
    assert edited.content.endswith("\n") == (content.endswith("\n") or not edited.lines[-1])


@settings(deadline=None, max_examples=150)
@given(CONTENTS, CONTENTS.filter(bool), CONTENTS)
def test_a_replacement_is_what_it_is_for_str(content, old, new):
    positions = occurrences(content, old)
    assert bool(positions) == (old in content)
    if len(positions) == 1:
        text = Text(content)
        assert text.replaced(positions[0], old, new).content == content.replace(old, new)
        assert content.split("\n")[text.line_of(positions[0]) - 1 :] == content[
            content.rfind("\n", 0, positions[0]) + 1 :
        ].split("\n")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(alphabet="abc\x0c\u2028\r", max_size=8), max_size=12), st.data())
def test_a_view_of_any_range_shows_those_lines_under_their_numbers(lines, data):
    content = "".join(f"{line}\n" for line in lines).encode()
    shown = Text.decode(content).lines
    first = data.draw(st.integers(1, max(1, len(shown))))
    last = data.draw(st.integers(first, max(first, len(shown))))
    text = Files()._page("a.txt", content, [first, last])
    assert text.partition("\n")[2] == numbered(shown[first - 1 : last], first, 1000)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text(alphabet="ab \t", max_size=6), max_size=8), st.text(alphabet="ab \t\n", max_size=20))
def test_every_text_that_is_not_there_gets_some_explanation(lines, old):
    assert explanation(lines, old, 100)


async def test_paths_are_those_that_a_command_in_the_sandbox_sees(files, slot):
    await files.str_replace_editor("create", "/tmp/a.txt", file_text="one\n")
    await files.str_replace_editor("create", "sub/b.txt", file_text="two\n")
    seen = await slot.exec(["cat", "/tmp/a.txt", "/workspace/sub/b.txt"])
    assert seen.stdout == b"one\ntwo\n"
    assert "     1\ttwo" in await files.str_replace_editor("view", "/workspace/sub/b.txt")
    assert await files.grep("one", "/tmp") == "/tmp/a.txt:1:one"
    assert await files.str_replace_editor("view", "/workspace") == "/workspace/sub/\n/workspace/sub/b.txt"


async def test_a_link_out_of_the_sandbox_leads_nowhere(files, slot):
    await slot.exec(["sh", "-c", "ln -s /etc/shadow s; ln -s ../../../../../../etc e; ln -s /root r"])
    for path in ("s", "e/shadow", "r/.ssh", "../../etc/shadow"):
        with pytest.raises(ToolError):
            await files.str_replace_editor("view", path)
    assert "root:" not in await files.grep("root:")


# Search


@pytest.fixture
def project(folder: Path) -> Path:
    (folder / "src").mkdir()
    (folder / ".git").mkdir()
    (folder / "src/main.py").write_text("import os\n\nprint('Hello')\n")
    (folder / "src/data.bin").write_bytes(b"Hello\0")
    (folder / "notes.txt").write_text("hello there\nfoo(bar)\n")
    (folder / ".git/config").write_text("Hello\n")
    return folder


async def test_grep_answers_with_path_line_and_text_and_skips_binary_files(files, project):
    assert await files.grep("Hel+o") == "src/main.py:3:print('Hello')\n[... binary files left out: 1 ...]"
    assert "notes.txt:1:hello there" in await files.grep("hello", ignore_case=True)
    assert await files.grep("foo(bar)", literal=True, include="*.txt") == "notes.txt:2:foo(bar)"
    assert await files.grep("import", "src/main.py") == "src/main.py:1:import os"
    assert await files.grep("import", "src", include="*.{c,txt}") == "no line matches"


async def test_grep_knows_the_beginning_and_the_end_of_a_line_whatever_ends_it(files, folder):
    (folder / "a.txt").write_bytes(b"one\r\ntwo\r\n\r\n")
    assert await files.grep("^two$") == "a.txt:2:two"


async def test_grep_in_a_path_that_is_not_there_is_an_error(files):
    with pytest.raises(ToolError, match="no such file or folder"):
        await files.grep("x", "nowhere")


@pytest.mark.parametrize("pattern", ["(", "(?=a)", r"(a)\1", "", "a" * 1001, "((((((a{1,100}){1,100}){1,100}))))"])
async def test_a_pattern_that_cannot_be_used_says_why(files, project, pattern):
    with pytest.raises(ToolError, match="pattern"):
        await files.grep(pattern)


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|aa)+$", "(.*)*b", "(x+x+)+y", "(a?){100}a{100}b", "(.{1,200}){1,5}b"]
)
async def test_a_pattern_that_would_hang_a_backtracking_engine_does_not_hang_this_one(files, folder, pattern):
    (folder / "a.txt").write_text(("a" * 30_000 + "!\n") * 20)
    started = time.monotonic()
    assert isinstance(await files.grep(pattern), str)
    assert time.monotonic() - started < search.SECONDS + 3.0


async def test_a_search_is_bounded_in_its_matches_and_in_what_it_shows(folder, files_in):
    (folder / "a.txt").write_text("needle in a long line " + "x" * 5000 + "\n" + "needle\n" * 500)
    text = await files_in(max_entries=20).grep("needle")
    assert "only the first 20 matching lines are shown" in text
    assert text.count("\n") == 20
    far = await files_in().grep("x needle|xx$")
    assert len(far) < 600


async def test_a_match_far_out_in_a_long_line_is_shown(files, folder):
    (folder / "a.txt").write_text("x" * 5000 + "needle" + "y" * 5000)
    text = await files.grep("needle")
    assert "needle" in text
    assert len(text) < 500


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.py", ["src/main.py"]),
        ("src/*", ["src/data.bin", "src/main.py"]),
        ("**/*.{py,txt}", ["notes.txt", "src/main.py"]),
        ("?otes.[!a]xt", ["notes.txt"]),
        ("src", ["src/"]),
        ("*.rs", ["no name matches"]),
    ],
)
async def test_glob_finds_names(files, project, pattern, expected):
    assert (await files.glob(pattern)).split("\n") == expected


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet="ab*?[]{},!^-\\./", max_size=12))
def test_any_shell_pattern_compiles_or_is_refused_kindly(pattern):
    with contextlib.suppress(ToolError):
        search.glob_pattern(pattern).fullmatch(b"ab/ab.a")


async def test_names_that_are_listed_can_be_given_back(files, project):
    for line in (await files.glob("**", "src")).split("\n"):
        assert line.startswith("src/")
    assert "1\timport os" in await files.str_replace_editor("view", (await files.glob("*.py", "src")).strip())
