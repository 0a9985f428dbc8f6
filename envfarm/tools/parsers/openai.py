"""An assistant message as chat-completion servers return it: JSON with ``content`` and ``tool_calls``.

For clients whose server has parsed the model's text already; they send that JSON unchanged.
"""

from __future__ import annotations

import msgspec

from envfarm.core.messages import AssistantMessage, Diagnosis, ToolCall
from envfarm.tools.payload import MAX_DEPTH, encodable, json_fault, too_deep


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


_decode = msgspec.json.Decoder(_Message).decode
_any = msgspec.json.Decoder().decode


def parse_openai(text: str, truncated: bool = False) -> AssistantMessage:
    """See :func:`envfarm.tools.parsers.parse`. Ids are kept where each call has its own, else counted."""
    text = encodable(text)
    if too_deep(text):
        return _unread(text, f"the message nests deeper than {MAX_DEPTH} levels")
    try:
        message = _decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        return _unread(text, f"the message is not an assistant message in JSON: {json_fault(error, text)}")
    written = message.tool_calls or []
    ids = [call.id or "" for call in written]
    if len({*ids} - {""}) < len(ids):
        ids = [f"call_{i}" for i in range(len(ids))]
    calls: list[ToolCall] = []
    detail = ""
    for call_id, call in zip(ids, written, strict=True):
        fault = _fault(call.function.arguments)
        if not fault:
            calls.append(ToolCall(call_id, call.function.name, call.function.arguments))
        elif not detail:
            detail = f"The arguments of tool call {ids.index(call_id) + 1} are {fault}."
    bad = Diagnosis.TRUNCATED if truncated else Diagnosis.SYNTAX
    return AssistantMessage(
        content=message.content or "",
        reasoning=message.reasoning_content or "",
        tool_calls=tuple(calls),
        diagnosis=bad if detail else Diagnosis.OK if written else Diagnosis.NONE,
        detail=detail,
    )


def _fault(arguments: str) -> str:
    if too_deep(arguments):
        return f"nested deeper than {MAX_DEPTH} levels"
    try:
        value = _any(arguments)
    except (msgspec.DecodeError, RecursionError) as error:
        return f"not valid JSON: {json_fault(error, arguments)}"
    return "" if isinstance(value, dict) else "not a JSON object"


def _unread(text: str, detail: str) -> AssistantMessage:
    return AssistantMessage(content=text, diagnosis=Diagnosis.SYNTAX, detail=f"{detail[0].upper()}{detail[1:]}.")
