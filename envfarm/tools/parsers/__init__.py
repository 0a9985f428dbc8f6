"""Assistant text to content, reasoning and calls: one module per format, found by name.

A parser is a pure function ``(text, truncated) -> AssistantMessage`` that takes time linear in the text and never
raises: what is malformed is graded and explained in one sentence for the model. Calls that are well formed are
kept beside those that are not. Whether a tool exists and its arguments fit is ``envfarm.tools.validation``'s matter.
"""

from __future__ import annotations

from collections.abc import Callable

from envfarm.core.errors import ConfigError
from envfarm.core.messages import AssistantMessage
from envfarm.core.suggestions import did_you_mean
from envfarm.tools.parsers.hermes import parse_hermes
from envfarm.tools.parsers.openai import parse_openai

Parser = Callable[[str, bool], AssistantMessage]
_PARSERS: dict[str, Parser] = {"hermes": parse_hermes, "openai": parse_openai}


def formats() -> tuple[str, ...]:
    """Names of all formats, sorted."""
    return tuple(sorted(_PARSERS))


def parser(format: str) -> Parser:  # noqa: A002 - the word of the protos
    """The parser of a format. Raises :class:`ConfigError` that lists what there is."""
    found = _PARSERS.get(format)
    if found is None:
        hint = did_you_mean(format, _PARSERS)
        raise ConfigError(f"no tool-call format named {format[:80]!r}{hint} (there is: {', '.join(formats())})")
    return found


def parse(format: str, text: str, *, truncated: bool = False) -> AssistantMessage:  # noqa: A002 - as above
    """Take ``text`` apart. ``truncated``: sampling stopped at the token limit, so an unfinished call was cut off.

    Diagnosis: ``ok`` (calls, all well formed), ``syntax``, ``truncated``, ``none`` (no call). Call ids are
    ``call_0``, ``call_1``, ... in the order written, unless the format carries ids.
    Raises :class:`ConfigError` for an unknown format, and nothing for any text.
    """
    return parser(format)(text, truncated)
