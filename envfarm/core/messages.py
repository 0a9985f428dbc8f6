"""Chat messages, tool calls and tool results, as text. No token ids: those live on the policy side."""

from __future__ import annotations

import enum
from typing import Any, Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]


class Diagnosis(enum.StrEnum):
    """How well formed the tool calls of one assistant message are, from best to worst (``none`` stands apart)."""

    OK = "ok"
    UNKNOWN_TOOL = "unknown_tool"
    SCHEMA = "schema"
    SYNTAX = "syntax"
    TRUNCATED = "truncated"
    NONE = "none"  # the message holds no call at all


class ToolCall(msgspec.Struct, frozen=True):
    """One call. ``arguments`` is the JSON text of an object, as the model wrote it (not yet validated)."""

    id: str
    name: str
    arguments: str


class ToolStatus(enum.StrEnum):
    """What became of one call."""

    OK = "ok"
    ERROR = "error"  # the tool said no, or raised
    INVALID = "invalid"  # never ran: unknown tool or arguments against the schema
    TIMEOUT = "timeout"


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the model sees of one call, and what became of it. ``seconds`` is wall time inside the tool."""

    call_id: str
    name: str
    status: ToolStatus
    content: str
    truncated: bool = False
    seconds: float = 0.0


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One chat message in the shape that chat templates know."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An assistant message taken apart: remaining text, reasoning, calls, and a graded diagnosis.

    ``detail`` says in one sentence what is wrong when ``diagnosis`` is neither ``ok`` nor ``none``; it is what the
    model gets to see.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    diagnosis: Diagnosis = Diagnosis.NONE
    detail: str = ""


class ToolSchema(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as the model sees it. ``parameters`` is the text of a JSON schema of type ``object``."""

    name: str
    description: str
    parameters: str
    ends: bool = False  # calling it ends the episode
    timeout_s: float | None = None

    def openai(self) -> dict[str, Any]:
        """The OpenAI function-calling form, which chat templates expect."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": msgspec.json.decode(self.parameters),
            },
        }
