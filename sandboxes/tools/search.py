"""Searching files for a pattern that a model wrote, within bounds of time, memory and output.

The matching runs in the host, on bytes that the sandbox hands out, and so works with any image. RE2 is what makes this
safe: it has no backtracking, so that time grows with text times pattern and memory stays below a set size; the pattern
cannot hang it as it could hang :mod:`re`. Its syntax is that of ``ripgrep``: no look-around, no back-references.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Sequence
from typing import Any, Protocol, cast

import msgspec
import re2

from envfarm.core.errors import ToolError
from envfarm.core.sandbox import FileEntry, FileKind, Sandbox
from sandboxes.tools.text import is_binary

MAX_PATTERN = 1000  # characters
MAX_MEMORY = 256 * 1024  # bytes that one compiled pattern may take
MAX_DEPTH = 64
MAX_FILES = 10_000
MAX_FILE_BYTES = 4 << 20
MAX_BYTES = 64 << 20
MAX_LINE = 10_000  # bytes of a line that are looked at
SECONDS = 5.0


class Pattern(Protocol):
    """A compiled pattern over bytes."""

    def search(self, text: bytes) -> Any:
        """The first match, or ``None``."""
        ...

    def fullmatch(self, text: bytes) -> Any:
        """The match of all of ``text``, or ``None``."""
        ...


class Match(msgspec.Struct, frozen=True):
    """A line in which the pattern was found: number from 1, its bytes, and where in them it was found."""

    path: str
    number: int
    line: bytes
    start: int


class Found(msgspec.Struct):
    """What a search brought, and ``notes`` on what it left out."""

    matches: list[Match]
    notes: list[str]


def compiled(pattern: str, *, literal: bool = False, ignore_case: bool = False) -> Pattern:
    """``pattern`` for matching bytes of UTF-8. Raises :class:`ToolError` that says what is wrong with it."""
    if not pattern or len(pattern) > MAX_PATTERN:
        raise ToolError(f"error: the pattern must have 1 to {MAX_PATTERN} characters, it has {len(pattern)}")
    options = re2.Options()
    options.max_mem = MAX_MEMORY
    options.log_errors = False
    options.literal = literal
    options.case_sensitive = not ignore_case
    try:
        return cast(Pattern, re2.compile(pattern, options))
    except re2.error as error:
        reason = error.args[0] if error.args else ""
        reason = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise ToolError(
            f"error: the pattern cannot be used: {reason}. The syntax is that of ripgrep, without look-around and "
            "back-references; for plain text set literal to true"
        ) from None


def glob_pattern(pattern: str) -> Pattern:
    """A shell pattern over whole paths: ``*`` and ``?`` stay in one folder, ``**`` does not, ``[…]``, ``{a,b}``."""
    if len(pattern) > MAX_PATTERN:
        raise ToolError(f"error: the pattern must have 1 to {MAX_PATTERN} characters, it has {len(pattern)}")
    return compiled(_from_glob(pattern.removeprefix("./")))


def _from_glob(pattern: str) -> str:
    out: list[str] = []
    braces = 0
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if pattern.startswith("**/", at):
            out.append("(?:.*/)?")
            at += 3
            continue
        if pattern.startswith("**", at):
            out.append(".*")
            at += 2
            continue
        close = pattern.find("]", at + 2) if char == "[" else -1
        if close > 0:
            inside = pattern[at + 1 : close].replace("\\", "\\\\").replace("[", "\\[")
            out.append(f"[{'^' + inside[1:] if inside[0] == '!' else inside}]")
            at = close + 1
            continue
        if char == "{" and "}" in pattern[at:]:
            braces += 1
            out.append("(?:")
        elif char == "}" and braces:
            braces -= 1
            out.append(")")
        elif char == "," and braces:
            out.append("|")
        else:
            out.append({"*": "[^/]*", "?": "[^/]"}.get(char) or re2.escape(char))
        at += 1
    return "".join(out) or "(?:)"


async def tree(sandbox: Sandbox, path: str) -> tuple[list[FileEntry], list[str]]:
    """Every entry below ``path`` but those of ``.git``, sorted, and notes on what is missing."""
    entries = await sandbox.list(path, depth=MAX_DEPTH, limit=MAX_FILES)
    notes = [f"only the first {MAX_FILES} files and folders were looked at"] if len(entries) >= MAX_FILES else []
    return [entry for entry in entries if ".git" not in entry.path.split("/")], notes


async def search(sandbox: Sandbox, pattern: Pattern, files: Sequence[tuple[str, FileEntry]], limit: int) -> Found:
    """At most ``limit`` lines with ``pattern`` in ``files`` (path to read, entry). Binary files are left out."""
    found = Found(matches=[], notes=[])
    deadline = time.monotonic() + SECONDS
    binary = long = total = 0
    for path, entry in files:
        if entry.kind is not FileKind.FILE:
            continue
        if total >= MAX_BYTES or time.monotonic() > deadline:
            found.notes.append(f"the search ended early, before {path}; name a narrower path")
            break
        try:
            data = await sandbox.read(path, MAX_FILE_BYTES)
        except ToolError:
            continue  # gone, or not for reading: as grep, which goes on
        total += len(data)
        if is_binary(data):
            binary += 1
            continue
        long += len(data) >= MAX_FILE_BYTES
        matches, in_time = await asyncio.to_thread(_in_file, pattern, path, data, limit - len(found.matches), deadline)
        found.matches += matches
        if not in_time:
            found.notes.append(f"the search took longer than {SECONDS:g} s and ended in {path}")
            break
        if len(found.matches) >= limit:
            found.notes.append(f"only the first {limit} matching lines are shown; search for something narrower")
            break
    if binary:
        found.notes.append(f"binary files left out: {binary}")
    if long:
        found.notes.append(f"of files larger than {MAX_FILE_BYTES >> 20} MiB only the beginning was searched")
    return found


def _in_file(pattern: Pattern, path: str, data: bytes, limit: int, deadline: float) -> tuple[list[Match], bool]:
    """Matching lines of one file, and whether the time sufficed."""
    matches: list[Match] = []
    for number, line in enumerate(io.BytesIO(data), 1):
        if time.monotonic() > deadline:
            return matches, False
        text = line[:MAX_LINE].rstrip(b"\r\n")
        match = pattern.search(text)
        if match is not None:
            matches.append(Match(path, number, text, match.start()))
            if len(matches) >= limit:
                break
    return matches, True
