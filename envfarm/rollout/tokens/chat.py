"""Domain messages as the dictionaries that chat templates read, with control tokens in other people's text marked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from envfarm.core.messages import Message, ToolCall, ToolSchema

Protect = Callable[[Any], Any]

HERMES_TOOLS = """\
# Tools

You may call one or more functions to answer the user. Their signatures, one JSON object a line:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and its arguments between tags, and nothing else:
<tool_call>
{{"name": "function", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def template_message(message: Message, protect: Protect) -> dict[str, Any]:
    """``message`` for a chat template that knows tools. Arguments become objects where they are valid JSON."""
    out: dict[str, Any] = {"role": message.role, "content": protect(message.content)}
    if message.tool_calls:
        out["tool_calls"] = [_template_call(call, protect) for call in message.tool_calls]
    if message.tool_call_id:
        out["tool_call_id"] = protect(message.tool_call_id)
    if message.name:
        out["name"] = protect(message.name)
    if message.reasoning:
        out["reasoning_content"] = protect(message.reasoning)
    return out


def template_tools(tools: Sequence[ToolSchema], protect: Protect) -> list[dict[str, Any]] | None:
    """OpenAI forms of ``tools``; ``None`` when there is none."""
    return [protect(tool.openai()) for tool in tools] or None


def as_plain_chat(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Message]:
    """``messages`` without tools, calls and tool results, for a template that knows none of them.

    Tools go to the system message, calls and results into text, in the Hermes manner.
    """
    plain: list[Message] = []
    for message in messages:
        if message.role == "tool":
            _append_result(plain, message)
        elif message.tool_calls:
            texts = [message.content, *(_call_text(call) for call in message.tool_calls)]
            plain.append(Message(role="assistant", content="\n".join(filter(None, texts)), reasoning=message.reasoning))
        else:
            plain.append(message)
    if not tools:
        return plain
    lines = "\n".join(msgspec.json.encode(tool.openai()).decode() for tool in tools)
    header = HERMES_TOOLS.format(tools=lines)
    if plain and plain[0].role == "system":
        return [Message(role="system", content=f"{plain[0].content}\n\n{header}"), *plain[1:]]
    return [Message(role="system", content=header), *plain]


def _append_result(plain: list[Message], message: Message) -> None:
    """Consecutive results share one user message."""
    text = f"<tool_response>\n{message.content}\n</tool_response>"
    if plain and plain[-1].role == "user" and plain[-1].content.endswith("</tool_response>"):
        plain[-1] = Message(role="user", content=f"{plain[-1].content}\n{text}")
    else:
        plain.append(Message(role="user", content=text))


def _template_call(call: ToolCall, protect: Protect) -> dict[str, Any]:
    arguments: Any = call.arguments
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        arguments = msgspec.json.decode(call.arguments)
    return {
        "type": "function",
        "id": call.id,
        "function": {"name": protect(call.name), "arguments": protect(arguments)},
    }


def _call_text(call: ToolCall) -> str:
    name = msgspec.json.encode(call.name).decode()
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments}}}\n</tool_call>'
