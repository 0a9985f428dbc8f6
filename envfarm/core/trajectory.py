"""The token-exact record of one attempt at a task. Arrays are numpy; codecs live in ``envfarm.trajectories``.

A trajectory has one *segment* as long as the chat template only ever appends; when a template rewrites its history
(a model whose thinking is stripped from earlier turns) the next turn starts a new segment.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from envfarm.core.messages import Diagnosis, Message
from envfarm.core.outcome import Outcome
from envfarm.core.sandbox import Isolation

Purpose = Literal["train", "evaluate", "collect"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
SCHEMA_VERSION = 1


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Five arrays of one length n: one entry per token the engine saw or produced, in order.

    ``mask`` is 1 where the policy sampled the token, else 0; ``logprobs`` (of the sampler), ``versions`` (of the
    policy) and ``steps`` (index of the step) hold where ``mask`` is 1, and are NaN, -1 and -1 elsewhere.
    """

    token_ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    steps: NDArray[np.int32]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step: what was said, what came back, and the reward parts (``None``: not measured)."""

    index: int
    message: Message
    replies: tuple[Message, ...]
    diagnosis: Diagnosis
    parts: dict[str, float | None]
    reward: float | None
    tool_errors: int = 0
    sampled_tokens: int = 0
    engine_seconds: float = 0.0
    environment_seconds: float = 0.0


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """``reward`` is the sum over steps, ``None`` when the outcome is not trainable or nothing was measured."""

    id: str
    run_id: str
    group_id: str
    group_size: int
    member: int
    attempt: int
    final: bool  # no further attempt follows; a group is whole when every member has a final record
    purpose: Purpose
    environment: str  # name@version
    split: str
    task_id: str
    seed: int
    policy: str
    outcome: Outcome
    prompt: tuple[Message, ...]
    segments: tuple[Segment, ...]
    steps: tuple[StepRecord, ...]
    reward: float | None
    catalogue: str  # hash of the tools the episode saw
    isolation: Isolation
    started_at: float  # seconds since the epoch
    ended_at: float
    labels: dict[str, str] = {}

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens the policy sampled."""
        return int(sum(int(s.mask.sum()) for s in self.segments))

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version among sampled tokens; ``None`` when none was sampled."""
        sampled = [s.versions[s.mask == 1] for s in self.segments if s.mask.any()]
        return int(min(v.min() for v in sampled)) if sampled else None


class TrajectoryHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What the log indexes without opening the payload."""

    id: str
    run_id: str
    group_id: str
    group_size: int
    member: int
    attempt: int
    final: bool
    purpose: Purpose
    environment: str
    outcome: Outcome
    reward: float | None
    steps: int
    sampled_tokens: int
    oldest_version: int | None
    ended_at: float

    @classmethod
    def of(cls, t: Trajectory) -> TrajectoryHeader:
        """The header that belongs to ``t``."""
        return cls(
            id=t.id,
            run_id=t.run_id,
            group_id=t.group_id,
            group_size=t.group_size,
            member=t.member,
            attempt=t.attempt,
            final=t.final,
            purpose=t.purpose,
            environment=t.environment,
            outcome=t.outcome,
            reward=t.reward if t.outcome.trainable else None,
            steps=len(t.steps),
            sampled_tokens=t.sampled_tokens,
            oldest_version=t.oldest_version,
            ended_at=t.ended_at,
        )
