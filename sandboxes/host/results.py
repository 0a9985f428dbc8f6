"""What a tool returned, as text for the model: strings as they are, everything else as JSON, cut to a limit."""

from __future__ import annotations

from typing import Any

import msgspec

from envfarm.core.errors import FarmError

_EXCEPTION_CHARACTERS = 500


class NotJson(FarmError):
    """A tool returned a value that JSON cannot carry."""

    code = "not_json"


def as_text(value: Any) -> str:
    """``value`` as the model sees it. Raises :class:`NotJson` that names the type."""
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        kind = type(value).__name__
        raise NotJson(f"error: the tool returned {kind}, which is not JSON ({_first_line(error)})") from None


def cut(text: str, limit: int) -> tuple[str, bool]:
    """Head and tail of ``text`` with a notice between them, at most ``limit`` bytes of UTF-8; whether it was cut.

    Characters that UTF-8 cannot carry (lone surrogates) become question marks.
    """
    if text.isascii() and len(text) <= limit:
        return text, False
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode(), False
    notice = f"\n[... {len(data) - limit} of {len(data)} bytes cut ...]\n".encode()
    room = limit - len(notice)
    if room <= 0:
        return data[:limit].decode("utf-8", "ignore"), True
    head, tail = room - room // 2, room // 2
    parts = (data[:head], notice, data[len(data) - tail :] if tail else b"")
    return "".join(part.decode("utf-8", "ignore") for part in parts), True


def exception_text(error: BaseException) -> str:
    """One line about an exception, for a model: ``ValueError: invalid literal ...``."""
    text = f"{type(error).__name__}: {_first_line(error)}".removesuffix(": ")
    return text if len(text) <= _EXCEPTION_CHARACTERS else text[: _EXCEPTION_CHARACTERS - 1] + "…"


def _first_line(error: BaseException) -> str:
    try:
        return (str(error).splitlines() or [""])[0]
    except Exception:  # an exception whose own __str__ raises
        return ""
