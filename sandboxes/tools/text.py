"""A text file as an editor sees it: numbered lines, exact replacement, insertion. Pure; what is not edited is kept.

Lines end with a line feed and nothing else, so that numbers agree with ``cat -n``, ``grep -n`` and tracebacks. A file
whose lines all end with CR LF is edited as if they ended with LF and keeps its CR LF; bytes that are not UTF-8 are
carried through; a missing line end at the end of the file stays missing.
"""

from __future__ import annotations

from envfarm.core.errors import ToolError

BINARY_SNIFF_BYTES = 8192
_SNIPPET_LINES = 4  # shown on either side of an edit
_OCCURRENCES_TOLD = 20


class Text:
    """The content of one file, with line feeds only, and how its lines end on disk."""

    def __init__(self, content: str, *, crlf: bool = False) -> None:
        self.content = content
        self._crlf = crlf

    @classmethod
    def decode(cls, data: bytes) -> Text:
        """From the bytes of a file."""
        content = data.decode("utf-8", "surrogateescape")
        crlf = 0 < content.count("\n") == content.count("\r\n")
        return cls(content.replace("\r\n", "\n") if crlf else content, crlf=crlf)

    def encode(self) -> bytes:
        """The bytes of the file."""
        content = self.content.replace("\n", "\r\n") if self._crlf else self.content
        return content.encode("utf-8", "surrogateescape")

    def given(self, text: str) -> str:
        """What a model wrote, with the line ends that ``content`` has."""
        return text.replace("\r\n", "\n") if self._crlf else text

    @property
    def lines(self) -> list[str]:
        """Lines without their ends; a line end at the end of the file begins no further line."""
        return _lines(self.content)

    def replaced(self, start: int, old: str, new: str) -> Text:
        """With ``old``, which stands at ``start``, replaced."""
        return Text(self.content[:start] + new + self.content[start + len(old) :], crlf=self._crlf)

    def inserted(self, after: int, text: str) -> Text:
        """With ``text`` as lines of its own behind line ``after`` (0: ahead of the first). Raises ``ToolError``."""
        lines = self.lines
        if not 0 <= after <= len(lines):
            raise ToolError(
                f"error: insert_line is {after}, but the file has {len(lines)} lines; "
                f"give a number from 0 (ahead of the first line) to {len(lines)} (behind the last)"
            )
        if not self.content:
            return Text(text, crlf=self._crlf)
        lines[after:after] = _lines(text) or [""]
        ended = self.content.endswith("\n") or not lines[-1]  # without its end a blank last line is none
        return Text("\n".join(lines) + ("\n" if ended else ""), crlf=self._crlf)

    def line_of(self, position: int) -> int:
        """Number of the line that holds the character at ``position``, from 1."""
        return self.content.count("\n", 0, position) + 1


def _lines(content: str) -> list[str]:
    lines = content.split("\n")
    return lines[:-1] if not lines[-1] else lines


def is_binary(data: bytes) -> bool:
    """Whether the beginning of a file says that it is no text."""
    return b"\0" in data[:BINARY_SNIFF_BYTES]


def occurrences(content: str, old: str) -> list[int]:
    """Where ``old`` stands, overlaps included: the first few positions."""
    found: list[int] = []
    start = content.find(old)
    while start >= 0 and len(found) <= _OCCURRENCES_TOLD:
        found.append(start)
        start = content.find(old, start + 1)
    return found


def ambiguous(text: Text, path: str, positions: list[int]) -> ToolError:
    """What to tell when ``old_str`` stands at several ``positions``."""
    told = positions[:_OCCURRENCES_TOLD]
    more = " and more" if len(positions) > len(told) else ""
    numbers = ", ".join(str(text.line_of(position)) for position in told)
    return ToolError(
        f"error: nothing was replaced, because old_str occurs more than once in {path}: it begins at lines "
        f"{numbers}{more}. Add lines around it to old_str so that it occurs only once."
    )


def numbered(lines: list[str], first: int, width: int) -> str:
    """``lines`` as ``cat -n`` shows them, the first with number ``first``, each cut to ``width`` characters."""
    return "\n".join(f"{number:6}\t{shown(line, width)}" for number, line in enumerate(lines, first))


def shown(line: str, width: int) -> str:
    """One line for a model: bytes that are not UTF-8 as U+FFFD, cut with a notice."""
    cut = f"{line[:width]} [... {len(line) - width} characters cut ...]" if len(line) > width else line
    return cut if cut.isascii() else cut.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def around(text: Text, first: int, count: int, width: int) -> str:
    """Lines ``first`` to ``first + count - 1`` and a few beside them, numbered."""
    lines = text.lines
    start = max(0, first - 1 - _SNIPPET_LINES)
    return numbered(lines[start : first - 1 + count + _SNIPPET_LINES], start + 1, width)
