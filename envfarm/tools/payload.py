"""JSON inside assistant text: how deep it may nest, and sentences that tell the model what is wrong with it."""

from __future__ import annotations

import re
from itertools import accumulate

MAX_DEPTH = 64
EXCERPT = 60
_STRINGS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_NOT_BRACKETS = re.compile(r"[^\[\]{}]+")
_DELTA = {"[": 1, "{": 1, "]": -1, "}": -1}
_BYTE = re.compile(r" \(byte (\d+)\)$")
_NAMES = {
    "Input data was truncated": "it ends too early or holds a broken escape",
    "Number out of range": "a number is out of range",
}


def encodable(text: str) -> str:
    """``text`` itself when UTF-8 can carry it; else with its lone surrogates replaced by ``?``."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def too_deep(text: str, depth: int = MAX_DEPTH) -> bool:
    """Whether JSON text nests deeper than ``depth``, found without recursion and in linear time."""
    if text.count("[") + text.count("{") <= depth:
        return False
    brackets = _NOT_BRACKETS.sub("", _STRINGS.sub("", text))
    return max(accumulate(_DELTA[b] for b in brackets), default=0) > depth


def json_fault(error: Exception, text: str) -> str:
    """What a decoding error says, as a clause, with the place in ``text`` where JSON allows to tell it."""
    if isinstance(error, RecursionError):
        return f"it nests deeper than {MAX_DEPTH} levels"
    reason = str(error).removeprefix("JSON is malformed: ").split(" - at ")[0].replace("`", "'")
    place = _BYTE.search(reason)
    if place is None:
        return _NAMES.get(reason, reason)
    before = text.encode("utf-8", "replace")[: int(place[1])].decode("utf-8", "ignore")
    at = len(before)
    return f"{reason[: place.start()]} at {excerpt(text[max(0, at - 20) : at + 20])}"


def excerpt(text: str, limit: int = EXCERPT) -> str:
    """``text`` in quotes on one line, cut to ``limit`` characters."""
    short = " ".join(text[: limit * 2].split())
    return repr(short if len(short) <= limit and len(text) <= limit * 2 else short[: limit - 3] + "...")
