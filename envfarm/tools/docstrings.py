"""What a tool's docstring says about it: a summary, and one note per parameter (Google style, ``Args:``)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns?|Raises|Yields?|Examples?|Notes?):\s*")
_ENTRY = re.compile(r"(\*{0,2}\w+)\s*(?:\([^)]*\))?:\s*(.*)")


def described(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The text before the first section as one line per paragraph, and the ``Args:`` entries by parameter name."""
    lines = (inspect.getdoc(function) or "").splitlines()
    first = next((i for i, line in enumerate(lines) if _SECTION.fullmatch(line)), len(lines))
    paragraphs = "\n".join(lines[:first]).strip().split("\n\n")
    return "\n".join(" ".join(p.split()) for p in paragraphs), _entries(lines[first:])


def _entries(lines: list[str]) -> dict[str, str]:
    notes: dict[str, str] = {}
    inside, indent, name = False, 0, ""
    for line in lines:
        if _SECTION.fullmatch(line):
            inside, indent, name = line.startswith(("Args", "Arg", "Param")), 0, ""
            continue
        if not inside or not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        indent = indent or depth
        entry = _ENTRY.fullmatch(line.strip()) if depth == indent else None
        if entry:
            name = entry[1]
            notes[name] = entry[2]
        elif name:
            notes[name] = f"{notes[name]} {line.strip()}".strip()
    return {key: text for key, text in notes.items() if text}
