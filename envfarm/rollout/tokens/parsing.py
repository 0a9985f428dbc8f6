"""Sampled ids to an assistant message. Boundaries that are tokens of their own are read from ids, never from text."""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from envfarm.core.messages import AssistantMessage, ToolCall
from envfarm.rollout.tokens.tokenizer import CUT, PolicyTokenizer
from envfarm.tools.parsers import parse

_CUTS = re.compile(f"{CUT}({CUT}?)")


class HermesReader:
    """Reads Hermes-style calls (Qwen2.5, Qwen3, Hermes, and models without a tool format of their own).

    Where ``<tool_call>`` is a token, the same letters spelled with ordinary tokens are only text.
    """

    def __init__(self, tokenizer: PolicyTokenizer, stop_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._stops = frozenset(stop_token_ids)
        self._control = frozenset(tokenizer.control.values())

    def read(self, output_ids: list[int], *, truncated: bool) -> AssistantMessage:
        """The message that ``output_ids`` spell, stop tokens at its end left out. Never raises."""
        end = len(output_ids)
        while end and output_ids[end - 1] in self._stops:
            end -= 1
        text = self._text(output_ids[:end])
        message = parse("hermes", text, truncated=truncated)
        return _restored(message) if CUT in text else message

    def _text(self, ids: list[int]) -> str:
        """Text of ``ids`` in which look-alikes of control tokens are marked."""
        decode, protect = self._tokenizer.decode, self._tokenizer.protect
        whole = decode(ids)
        if protect(whole) == whole:
            return whole
        parts: list[str] = []
        start = 0
        for place, index in enumerate(ids):
            if index in self._control:
                parts += (
                    self._tokenizer.protect(self._tokenizer.decode(ids[start:place])),
                    self._tokenizer.decode(index),
                )
                start = place + 1
        parts.append(protect(decode(ids[start:])))
        return "".join(parts)


def _restored(message: AssistantMessage) -> AssistantMessage:
    def restore(text: str) -> str:
        return _CUTS.sub(r"\1", text)

    return msgspec.structs.replace(
        message,
        content=restore(message.content),
        reasoning=restore(message.reasoning),
        tool_calls=tuple(ToolCall(c.id, restore(c.name), restore(c.arguments)) for c in message.tool_calls),
        detail=restore(message.detail),
    )
