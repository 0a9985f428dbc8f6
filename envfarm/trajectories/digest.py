"""A digest of what happened in an episode, equal wherever and whenever the same things happen.

Left out: ids (trajectory, run, group; call ids are renumbered within their step), clock times and durations,
labels, the attempt's number, the path of the policy, and the isolation level, which depends on the backend.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from envfarm.core.ids import digest
from envfarm.core.messages import Message
from envfarm.core.trajectory import Segment, StepRecord, Trajectory

_STORY = (
    "group_size",
    "member",
    "purpose",
    "environment",
    "split",
    "task_id",
    "seed",
    "outcome",
    "reward",
    "catalogue",
)
_STEP = ("index", "diagnosis", "parts", "reward", "tool_errors", "sampled_tokens")


def trajectory_digest(trajectory: Trajectory) -> str:
    """Hex digest (32 characters) over tokens, masks, log-probabilities, messages, rewards and outcome."""
    story: dict[str, Any] = {field: getattr(trajectory, field) for field in _STORY}
    story["prompt"] = _messages(trajectory.prompt)
    story["steps"] = [_step(step) for step in trajectory.steps]
    text = msgspec.json.encode(story, order="deterministic")
    return digest(text, *(part for segment in trajectory.segments for part in _arrays(segment)))


def _step(step: StepRecord) -> dict[str, Any]:
    fields = {field: getattr(step, field) for field in _STEP}
    return fields | {"messages": _messages((step.message, *step.replies))}


def _messages(messages: Iterable[Message]) -> list[Message]:
    """Messages with call ids replaced by the order in which they first appear among them."""
    calls: dict[str, str] = {}

    def number(call_id: str) -> str:
        return calls.setdefault(call_id, str(len(calls))) if call_id else ""

    renumbered = []
    for message in messages:
        tool_calls = tuple(msgspec.structs.replace(call, id=number(call.id)) for call in message.tool_calls)
        answered = number(message.tool_call_id)
        renumbered.append(msgspec.structs.replace(message, tool_calls=tool_calls, tool_call_id=answered))
    return renumbered


def _arrays(segment: Segment) -> Iterable[bytes]:
    """Bytes of each array, little-endian; every NaN counts as the same NaN."""
    logprobs = np.where(np.isnan(segment.logprobs), np.float32("nan"), segment.logprobs)
    arrays = (segment.token_ids, segment.mask, logprobs, segment.versions, segment.steps)
    return [array.astype(array.dtype.newbyteorder("<")).tobytes() for array in arrays]
