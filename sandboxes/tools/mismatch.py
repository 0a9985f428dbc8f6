"""Why a text that should be replaced was not found: a sentence that lets a model mend its call at once."""

from __future__ import annotations

import heapq
import re
import time
from difflib import SequenceMatcher

from sandboxes.tools.text import numbered

_NUMBER = re.compile(r"^ *\d+\t", re.MULTILINE)
_LINES_COMPARED = 20_000
_CHARACTERS_COMPARED = 200
_SECONDS = 0.5  # of comparing
_LIKE_ENOUGH = 0.6
_SHOWN = 3
_WINDOW_LINES = 12


def explanation(lines: list[str], old: str, width: int) -> str:
    """What a model should know about a file of ``lines`` in which ``old`` does not occur. May take half a second."""
    if (unnumbered := _NUMBER.sub("", old)) != old and unnumbered in "\n".join(lines):
        return "old_str begins its lines with the numbers that view shows; leave numbers and tabs out."
    wanted = _trimmed(old.split("\n"))
    if not wanted:
        return "old_str is nothing but whitespace; take in a line with text."
    start = _apart_from_whitespace(lines, wanted)
    if start is not None:
        found = lines[start : start + len(wanted)]
        end = start + len(wanted)
        span = f"line {end}" if len(wanted) == 1 else f"lines {start + 1}-{end}"
        return f"It differs only in whitespace from {span} ({_whitespace(found, wanted)}), which read:\n" + numbered(
            found[:_WINDOW_LINES], start + 1, width
        )
    anchor = max(wanted, key=lambda line: len(line.strip()))
    near = _closest(lines, anchor.strip())
    if not near:
        return "No line of the file is like it; view the file again."
    return "The closest lines are:\n" + "\n".join(numbered([lines[i]], i + 1, width) for i in sorted(near))


def _trimmed(lines: list[str]) -> list[str]:
    """Without blank lines at either end."""
    kept = [i for i, line in enumerate(lines) if line.strip()]
    return lines[kept[0] : kept[-1] + 1] if kept else []


def _apart_from_whitespace(lines: list[str], wanted: list[str]) -> int | None:
    """Index of the first line from which ``wanted`` would follow if whitespace did not count."""
    keys = ["".join(line.split()) for line in lines]
    looked_for = ["".join(line.split()) for line in wanted]
    for start in range(len(keys) - len(looked_for) + 1):
        if keys[start] == looked_for[0] and keys[start : start + len(looked_for)] == looked_for:
            return start
    return None


def _whitespace(found: list[str], wanted: list[str]) -> str:
    pairs = list(zip(found, wanted, strict=True))
    if any(_indent(f).count("\t") > _indent(w).count("\t") for f, w in pairs):
        return "the file indents with tabs there"
    if any(_indent(w).count("\t") > _indent(f).count("\t") for f, w in pairs):
        return "the file indents with spaces there"
    if all(f.rstrip() == w.rstrip() for f, w in pairs):
        return "at the ends of lines, or in blank lines around it"
    if all(f.strip() == w.strip() for f, w in pairs):
        return "the indentation"
    return "between words"


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _closest(lines: list[str], anchor: str) -> list[int]:
    """Indices of the lines most like ``anchor``, as far as the time allows to compare."""
    deadline = time.monotonic() + _SECONDS
    matcher = SequenceMatcher(autojunk=False, b=anchor[:_CHARACTERS_COMPARED])
    best: list[tuple[float, int]] = []
    for index, line in enumerate(lines[:_LINES_COMPARED]):
        if time.monotonic() > deadline:
            break
        bar = max(_LIKE_ENOUGH, best[0][0]) if len(best) == _SHOWN else _LIKE_ENOUGH
        matcher.set_seq1(line.strip()[:_CHARACTERS_COMPARED])
        if matcher.real_quick_ratio() > bar and matcher.quick_ratio() > bar and (like := matcher.ratio()) > bar:
            heapq.heappush(best, (like, -index))
            if len(best) > _SHOWN:
                heapq.heappop(best)
    return [-index for _, index in best]
