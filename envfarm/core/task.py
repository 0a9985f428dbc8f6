"""One instance of an environment: what the episode starts from and what its verifier needs."""

from __future__ import annotations

from typing import Any

import msgspec

from envfarm.core.messages import Message

SPLITS = ("train", "validation", "test")
TASKS_PER_PAGE = 1000
"""Most tasks that one request may ask for."""


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``id`` is unique within (environment, split). ``data`` must survive JSON: it travels to the sandbox over RPC."""

    id: str
    prompt: str | tuple[Message, ...] = ""
    seed: int = 0
    files: dict[str, bytes] = {}
    data: dict[str, Any] = {}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one episode. Seconds are wall time; bytes are of UTF-8 text."""

    steps: int = 16
    seconds: float = 600.0
    tokens_per_step: int = 1024
    context_tokens: int = 8192
    tool_seconds: float = 10.0
    reset_seconds: float = 60.0
    verify_seconds: float = 60.0
    result_bytes: int = 16_384
    calls_per_step: int = 16
    message_bytes: int = 262_144
