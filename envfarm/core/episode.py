"""What the policy side gets from the gateway: an opened episode, an answered step, and what an environment offers."""

from __future__ import annotations

import msgspec

from envfarm.core.messages import AssistantMessage, Diagnosis, Message, ToolResult, ToolSchema
from envfarm.core.outcome import Outcome
from envfarm.core.rewards import RewardSettings
from envfarm.core.sandbox import Isolation, SandboxProfile
from envfarm.core.task import Limits


class EnvironmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment offers and what its slots need. ``catalogue`` is the hash of its tools."""

    name: str
    version: str
    description: str
    tools: tuple[ToolSchema, ...]
    limits: Limits
    reward: RewardSettings
    system_prompt: str
    catalogue: str
    isolation: Isolation
    profile: SandboxProfile = SandboxProfile()


class TextAction(msgspec.Struct, frozen=True, kw_only=True):
    """An assistant message as raw text, for the gateway to parse. ``format`` is a parser's name (``hermes``)."""

    format: str
    text: str


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """A started episode. ``handle`` routes itself: signed, valid at any gateway replica."""

    handle: str
    episode_id: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...]
    catalogue: str
    limits: Limits
    isolation: Isolation
    environment: str  # name@version


class StepAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The environment's answer to one step. ``messages`` are to be appended to the conversation.

    ``reward`` is ``None`` when nothing was measured or the outcome carries none. ``message`` is the gateway's own
    reading of the action when it was sent as text.
    """

    index: int
    messages: tuple[Message, ...]
    results: tuple[ToolResult, ...]
    parts: dict[str, float | None]
    reward: float | None
    done: bool
    outcome: Outcome | None
    diagnosis: Diagnosis
    seconds: float
    message: AssistantMessage | None = None
