"""Files for models: view, create, replace, insert, and search in contents and names.

The editor has the name, the commands and the arguments of the ``str_replace_editor`` that public agents and the data
sets made with them use (SWE-agent, OpenHands, R2E-Gym): a policy that has seen one knows this one. Lines are numbered
as ``cat -n`` does. ``undo_edit`` is left out, as later versions of that editor do. ``grep`` and ``glob`` are the pair
that coding agents have beside it, with ripgrep's syntax.

Everything goes through the file methods of the sandbox, so that it works with any image and no program has to be in
there. Nothing is kept between two calls.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from msgspec import Meta

from envfarm.core.environment import Toolset, tool
from envfarm.core.errors import ToolError
from envfarm.core.sandbox import FileEntry, FileKind
from sandboxes.tools import search
from sandboxes.tools.mismatch import explanation
from sandboxes.tools.text import Text, ambiguous, around, is_binary, numbered, occurrences, shown

_FOLDER_DEPTH = 2
_MATCH_WIDTH = 300
_LEAD = 60  # characters of a long line shown ahead of a match
_SNIPPET_WIDTH = 400


class Files(Toolset):
    """View, create and edit text files; search for them and in them.

    ``max_lines``, ``max_bytes``: what one view shows at most (bytes of UTF-8; keep it below
    ``Limits.result_bytes``); ``max_line``: characters of a line that are shown; ``max_file_bytes``: size of the largest
    file that can be edited, and how much of a larger one can be viewed; ``max_entries``: entries and matches listed.
    """

    def __init__(
        self,
        *,
        max_lines: int = 500,
        max_bytes: int = 14_000,
        max_line: int = 1000,
        max_file_bytes: int = 1 << 20,
        max_entries: int = 200,
    ) -> None:
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._max_line = max_line
        self._max_file_bytes = max_file_bytes
        self._max_entries = max_entries

    @tool
    async def str_replace_editor(
        self,
        command: Literal["view", "create", "str_replace", "insert"],
        path: str,
        file_text: str | None = None,
        old_str: str | None = None,
        new_str: str | None = None,
        insert_line: int | None = None,
        view_range: Annotated[list[int], Meta(min_length=2, max_length=2)] | None = None,
    ) -> str:
        """View, create and edit text files. A view of a file numbers its lines; one of a folder lists two levels of it.

        Args:
            command: What to do.
            path: A file or folder, absolute or relative to the working folder.
            file_text: For create: the whole content of the file. A file that exists is overwritten.
            old_str: For str_replace: the text to replace, exactly as it stands in the file, whitespace too. It must
                occur once; take in as many lines as that needs. Leave line numbers out.
            new_str: For str_replace: what replaces old_str; nothing when left out. For insert: the lines to insert.
            insert_line: For insert: the line behind which new_str goes; 0 puts it ahead of the first line.
            view_range: For view of a file: first and last line to show, from 1; -1 as last means up to the end.
        """
        if command == "view":
            return await self._view(path, view_range)
        if command == "create":
            return await self._create(path, _given(file_text, command, "file_text"))
        if command == "str_replace":
            return await self._replace(path, _given(old_str, command, "old_str"), new_str or "")
        if insert_line is None:
            raise ToolError("error: insert needs insert_line, the line behind which new_str goes")
        return await self._insert(path, insert_line, _given(new_str, command, "new_str"))

    @tool
    async def grep(
        self, pattern: str, path: str = ".", include: str = "", literal: bool = False, ignore_case: bool = False
    ) -> str:
        """Search the contents of files for a regular expression. Answers with path:line:text of each matching line.

        Args:
            pattern: Regular expression in the syntax of ripgrep: no look-around, no back-references.
            path: A file, or a folder that is searched with all below it.
            include: Only files whose name or path fits this shell pattern, for example *.py or src/**/*.{c,h}.
            literal: Take pattern as plain text.
            ignore_case: Let upper and lower case match each other.
        """
        wanted = search.compiled(pattern, literal=literal, ignore_case=ignore_case)
        files, notes = await self._files(path, include)
        found = await search.search(self.sandbox, wanted, files, self._max_entries)
        lines = [f"{match.path}:{match.number}:{_excerpt(match)}" for match in found.matches]
        return self._listing(lines, notes + found.notes, "no line matches")

    @tool
    async def glob(self, pattern: str, path: str = ".") -> str:
        """Find files and folders by name. Answers with one path a line, folders with a slash at the end.

        Args:
            pattern: Shell pattern, for example *.py (by name, at any depth), src/*.c or **/test_*.{py,txt}.
            path: The folder below which to look.
        """
        wanted = search.glob_pattern(pattern)
        entries, notes = await search.tree(self.sandbox, path)
        lines = [_label(path, entry) for entry in entries if _fits(wanted, pattern, entry)]
        return self._listing(lines, notes, "no name matches")

    # The editor's commands

    async def _view(self, path: str, view_range: list[int] | None) -> str:
        try:
            data = await self.sandbox.read(path, self._max_file_bytes + 1)
        except ToolError as error:
            try:
                entries = await self.sandbox.list(path, depth=_FOLDER_DEPTH)
            except ToolError:
                raise error from None
            if view_range is not None:
                raise ToolError(f"error: {path} is a folder; view_range is for files") from None
            lines = [_label(path, entry) for entry in entries if not _hidden(entry)]
            return self._listing(lines, ["hidden ones are left out"] if len(lines) < len(entries) else [], "(empty)")
        if is_binary(data):
            raise ToolError(f"error: {path} is a binary file ({self._size(data)}); it cannot be shown as text")
        return await asyncio.to_thread(self._page, path, data, view_range)

    def _page(self, path: str, data: bytes, view_range: list[int] | None) -> str:
        lines = Text.decode(data[: self._max_file_bytes]).lines
        first, last = _range(view_range, len(lines))
        page: list[str] = []
        used = 0
        for number in range(first, min(last, first + self._max_lines - 1) + 1):
            line = numbered([lines[number - 1]], number, self._max_line)
            used += len(line.encode()) + 1
            if page and used > self._max_bytes:
                break
            page.append(line)
        shown_to = first + len(page) - 1
        head = f"{path}, lines {first}-{shown_to} of {len(lines)}:" if lines else f"{path} is empty."
        notes = []
        if shown_to < last:
            notes.append(f"[... cut: lines {shown_to + 1}-{last} follow; use view_range=[{shown_to + 1}, {last}] ...]")
        if len(data) > self._max_file_bytes:
            notes.append(
                f"[... the file is larger than the {self._max_file_bytes} bytes that can be viewed; use grep ...]"
            )
        return "\n".join([head, *page, *notes])

    async def _create(self, path: str, text: str) -> str:
        try:
            await self.sandbox.read(path, 1)
            done = "overwritten"
        except ToolError:
            done = "created"
        await self.sandbox.write(path, text.encode("utf-8", "replace"))
        lines = len(Text(text).lines)
        return f"The file {path} has been {done} ({lines} line{'s' if lines != 1 else ''})."

    async def _replace(self, path: str, old: str, new: str) -> str:
        text = await self._text(path)
        old, new = text.given(old), text.given(new)
        if not old:
            raise ToolError("error: old_str is empty; to add lines use insert, to write a whole file create")
        if old == new:
            raise ToolError("error: old_str and new_str are the same; nothing was changed")
        positions = occurrences(text.content, old)
        if len(positions) > 1:
            raise ambiguous(text, path, positions)
        if not positions:
            reason = await asyncio.to_thread(explanation, text.lines, old, _SNIPPET_WIDTH)
            raise ToolError(f"error: nothing was replaced, because old_str does not occur in {path}. {reason}")
        edited = text.replaced(positions[0], old, new)
        return await self._write(path, edited, text.line_of(positions[0]), new.count("\n") + 1)

    async def _insert(self, path: str, after: int, new: str) -> str:
        text = await self._text(path)
        if not new:
            raise ToolError("error: new_str is empty; there is nothing to insert")
        new = text.given(new)
        edited = text.inserted(after, new)
        return await self._write(path, edited, after + 1, len(Text(new).lines))

    async def _text(self, path: str) -> Text:
        data = await self.sandbox.read(path, self._max_file_bytes + 1)
        if is_binary(data):
            raise ToolError(f"error: {path} is a binary file ({self._size(data)}); it cannot be edited as text")
        if len(data) > self._max_file_bytes:
            raise ToolError(f"error: {path} is larger than the {self._max_file_bytes} bytes that can be edited")
        return Text.decode(data)

    async def _write(self, path: str, text: Text, first: int, count: int) -> str:
        await self.sandbox.write(path, text.encode())
        snippet = await asyncio.to_thread(around, text, first, min(count, self._max_lines), _SNIPPET_WIDTH)
        return self._cut(f"The file {path} has been edited. It now reads there:\n{snippet}")

    # What searches and listings have in common

    async def _files(self, path: str, include: str) -> tuple[list[tuple[str, FileEntry]], list[str]]:
        """Files below ``path``, or ``path`` itself, that fit ``include``."""
        wanted = search.glob_pattern(include) if include else None
        try:
            entries, notes = await search.tree(self.sandbox, path)
        except ToolError:
            await self.sandbox.read(path, 1)  # says why, unless it is a file
            return [(path, FileEntry(path=path, kind=FileKind.FILE, size=0))], []
        return [
            (_label(path, entry), entry)
            for entry in entries
            if entry.kind is FileKind.FILE and (wanted is None or _fits(wanted, include, entry))
        ], notes

    def _listing(self, lines: list[str], notes: list[str], nothing: str) -> str:
        if len(lines) > self._max_entries:
            notes = [f"only the first {self._max_entries} of {len(lines)} are shown", *notes]
            lines = lines[: self._max_entries]
        text = self._cut("\n".join(shown(line, self._max_line) for line in lines) or nothing)
        return "\n".join([text, *(f"[... {note} ...]" for note in notes)])

    def _cut(self, text: str) -> str:
        data = text.encode("utf-8", "replace")
        if len(data) <= self._max_bytes:
            return data.decode()
        head = data[: self._max_bytes].decode("utf-8", "ignore").rpartition("\n")[0]
        return f"{head}\n[... cut at {self._max_bytes} bytes ...]"

    def _size(self, data: bytes) -> str:
        most = self._max_file_bytes
        return f"{len(data)} bytes" if len(data) <= most else f"more than {most} bytes"


def _given(value: str | None, command: str, name: str) -> str:
    if value is None:
        raise ToolError(f"error: {command} needs {name}")
    return value


def _range(view_range: list[int] | None, count: int) -> tuple[int, int]:
    """First and last line to show of a file of ``count`` lines."""
    if view_range is None:
        return 1, count
    first, last = view_range
    if last == -1:
        last = max(count, 1)
    if not 1 <= first <= max(count, 1) or last < first:
        raise ToolError(
            f"error: view_range is [{view_range[0]}, {view_range[1]}], but the file has {count} lines; give the first "
            "line (from 1), then the last one (not below the first; -1 for the end)"
        )
    return first, min(last, count)


def _label(folder: str, entry: FileEntry) -> str:
    """Path of an entry as the model can write it in its next call."""
    path = entry.path if folder in (".", "./", "") else f"{folder.rstrip('/')}/{entry.path}"
    return path + ("/" if entry.kind is FileKind.FOLDER else "")


def _hidden(entry: FileEntry) -> bool:
    return any(part.startswith(".") for part in entry.path.split("/"))


def _fits(wanted: search.Pattern, pattern: str, entry: FileEntry) -> bool:
    """Whether an entry fits a shell pattern: by its path, or by its name when the pattern has no slash."""
    name = entry.path if "/" in pattern else entry.path.rpartition("/")[2]
    return wanted.fullmatch(name.encode("utf-8", "surrogateescape")) is not None


def _excerpt(match: search.Match) -> str:
    """The matching line, of a long one the part around the match."""
    line = match.line.decode("utf-8", "surrogateescape")
    at = len(match.line[: match.start].decode("utf-8", "surrogateescape"))
    start = max(0, at - _LEAD) if len(line) > _MATCH_WIDTH else 0
    before = f"[... {start} characters cut ...] " if start else ""
    return before + shown(line[start:], _MATCH_WIDTH)
