"""Tokens by the library ``renderers``, which knows the formats of many models, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from envfarm.core.errors import ConfigError
from envfarm.core.messages import AssistantMessage, Diagnosis, Message, ToolCall, ToolSchema
from envfarm.rollout.tokens.builder import Extension, TokenBuilder
from envfarm.rollout.tokens.chat import template_message, template_tools
from envfarm.rollout.tokens.parsing import HermesReader
from envfarm.rollout.tokens.tokenizer import PolicyTokenizer

_HERMES = frozenset({"qwen3", "qwen3-vl"})
_FAULTS = {
    "invalid_json": "its arguments are not valid JSON",
    "unclosed_block": "it is not closed",
    "missing_name": "it names no tool",
    "malformed_structure": "it has the wrong shape",
}


class LibraryBuilder(TokenBuilder):
    """A :class:`~envfarm.rollout.tokens.builder.TokenBuilder` by one of the library's renderers.

    ``name``: the library's name of the format (``qwen3``, ``glm-4.5``, ``gpt-oss``, ...). Raises
    :class:`ConfigError` when the library has no such format or the tokenizer lacks its control tokens.
    """

    def __init__(self, tokenizer: PolicyTokenizer, name: str, stop_token_ids: Sequence[int] = ()) -> None:
        from renderers import config_from_name, create_renderer

        self.name = name
        self._tokenizer = tokenizer
        try:
            self._renderer: Any = create_renderer(tokenizer, config_from_name(name))
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{tokenizer.name_or_path} cannot be rendered as {name!r}: {error}") from error
        self._stops = tuple(dict.fromkeys([*self._renderer.get_stop_token_ids(), *stop_token_ids]))
        self._hermes = HermesReader(tokenizer, self._stops) if name in _HERMES else None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant message."""
        return self._stops

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """See :class:`TokenBuilder`."""
        return list(
            self._renderer.render_ids(self._chat(messages), tools=self._tools(tools), add_generation_prompt=True)
        )

    def extend(
        self,
        *,
        prompt_ids: list[int],
        output_ids: list[int],
        history: Sequence[Message],
        replies: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> Extension:
        """See :class:`TokenBuilder`."""
        seen = len(prompt_ids) + len(output_ids)
        bridged = self._renderer.bridge_to_next_turn(
            prompt_ids, output_ids, self._chat(replies), tools=self._tools(tools)
        )
        if bridged is not None:
            ids = list(bridged.token_ids)
            if ids[:seen] == prompt_ids + output_ids:
                return Extension(ids[seen:])
        return Extension(self.start([*history, *replies], tools), replaces=True)

    def parse(
        self, output_ids: list[int], *, prompt_ids: list[int], tools: Sequence[ToolSchema], truncated: bool
    ) -> AssistantMessage:
        """See :class:`TokenBuilder`."""
        if self._hermes is not None:
            return self._hermes.read(output_ids, truncated=truncated)
        try:
            parsed = self._renderer.parse_response(output_ids, tools=self._tools(tools), prompt_ids=prompt_ids)
        except Exception as error:  # whatever a policy writes is data, not a crash
            return AssistantMessage(
                content=self._tokenizer.decode(output_ids),
                diagnosis=Diagnosis.TRUNCATED if truncated else Diagnosis.SYNTAX,
                detail=f"The message cannot be read ({type(error).__name__}); write plain text or a well-formed call.",
            )
        return _message(parsed, truncated=truncated)

    def _chat(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        return [template_message(message, self._tokenizer.protect_all) for message in messages]

    def _tools(self, tools: Sequence[ToolSchema]) -> list[dict[str, Any]] | None:
        return template_tools(tools, self._tokenizer.protect_all)


def _message(parsed: Any, *, truncated: bool) -> AssistantMessage:
    calls: list[ToolCall] = []
    diagnosis, detail = Diagnosis.OK if parsed.tool_calls else Diagnosis.NONE, ""
    for number, call in enumerate(parsed.tool_calls, 1):
        status = str(call.status.value)
        if status in _FAULTS or not isinstance(call.name, str):
            cut = truncated and status == "unclosed_block"
            diagnosis = Diagnosis.TRUNCATED if cut or diagnosis is Diagnosis.TRUNCATED else Diagnosis.SYNTAX
            detail = detail or f"Tool call {number}: {_FAULTS.get(status, 'it cannot be read')}."
            continue
        arguments = call.arguments if call.arguments is not None else {}
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        calls.append(ToolCall(call.id or f"call_{len(calls)}", call.name, text))
    return AssistantMessage(
        content=parsed.content,
        reasoning=parsed.reasoning_content or "",
        tool_calls=tuple(calls),
        diagnosis=diagnosis,
        detail=detail,
    )
