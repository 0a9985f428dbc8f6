"""What a model sees of the bytes that a command wrote: text, harmless, cut in the middle. Pure."""

from __future__ import annotations

import re

from sandboxes.isolation.processes.output import HeadTail

# Colours, cursor movements, titles: ECMA-48, sections 5.4 and 5.6.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
_NOTICE_BYTES = 80


def readable(data: bytes) -> str:
    """Text of ``data``: what is not UTF-8 and control characters as U+FFFD, escape sequences gone, LF at line ends."""
    text = data.decode("utf-8", "replace")
    if text.isascii() and text.isprintable():
        return text
    text = _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return text.translate(_CONTROLS)


def transcript(output: HeadTail, limit: int) -> str:
    """``output`` as text of at most ``limit`` bytes of UTF-8 (200 or more), with a notice of what is left out."""
    head, tail = output.parts
    if not output.truncated:
        text = readable(head + tail)
        size = len(text.encode())
        if size <= limit:
            return text
        before = after = text
    else:
        size = output.total
        before, after = readable(_whole_end(head)), readable(_whole_start(tail))
    room = (limit - _NOTICE_BYTES) // 2
    before = before.encode()[:room].decode("utf-8", "ignore")
    after = after.encode()[-room:].decode("utf-8", "ignore")
    left_out = max(size - len(before.encode()) - len(after.encode()), 1)
    return f"{before}\n[... {left_out} of {size} bytes left out ...]\n{after}"


def _whole_end(data: bytes) -> bytes:
    """Without a character that a cut behind ``data`` has split."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:  # the first byte of a character, which says how many it has
            length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if length > back else data
    return data


def _whole_start(data: bytes) -> bytes:
    """Without the rest of a character that a cut ahead of ``data`` has split."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]
