"""What a rollout asks of the gateway. ``envfarm.wire`` has the clients that offer it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from envfarm.core.engine import Engine
from envfarm.core.episode import Opened, StepAnswer
from envfarm.core.log import Appended, LogRecord
from envfarm.core.messages import AssistantMessage
from envfarm.core.rewards import RewardSettings
from envfarm.core.run import GroupTicket, MetricPoint, Run
from envfarm.core.task import Task
from envfarm.rollout.tokens import TokenBuilder


class Episodes(Protocol):
    """Opens, steps and closes episodes, and lists tasks: :class:`envfarm.wire.episode_client.EpisodeClient`."""

    async def tasks(self, environment: str, split: str, offset: int, limit: int) -> list[Task]:
        """A page of tasks."""
        ...

    async def open(
        self,
        *,
        environment: str,
        task: Task,
        seed: int,
        run_id: str = "",
        reward: RewardSettings | None = None,
        request_id: str,
        timeout: float,
    ) -> Opened:
        """Start an episode."""
        ...

    async def step(
        self,
        handle: str,
        index: int,
        action: AssistantMessage,
        *,
        sampled_tokens: int | None = None,
        truncated: bool = False,
        limit: str = "",
        timeout: float,
    ) -> StepAnswer:
        """Take a step."""
        ...

    async def close(self, handle: str, reason: str = "") -> None:
        """End an episode."""
        ...


class Log(Protocol):
    """Takes finished trajectories: :class:`envfarm.wire.log_client.LogClient`."""

    async def append(self, records: Sequence[LogRecord], *, timeout: float) -> Sequence[Appended]:
        """Returns when all are durable. Raises ``LogFull`` or ``Unavailable`` when they are not within ``timeout``."""
        ...


class Runs(Protocol):
    """Hands out groups and takes metrics: :class:`envfarm.wire.run_client.RunClient`."""

    async def acquire(self, run_id: str, worker: str, limit: int, timeout: float) -> tuple[list[GroupTicket], Run, str]:
        """Leave to run groups, or the reason why there is none."""
        ...

    async def report(self, run_id: str, points: Sequence[MetricPoint]) -> None:
        """Add points to series."""
        ...


class PolicySide(msgspec.Struct, frozen=True, kw_only=True):
    """All that an episode needs on the policy's side. ``name`` is the policy's, for the record.

    ``context_tokens``: most tokens that the engines take, prompt and answer together; ``None``: not known. The
    environment's own limit holds too. Filled in by :func:`envfarm.rollout.sampling.within_context`.
    """

    episodes: Episodes
    engine: Engine
    tokens: TokenBuilder
    log: Log
    name: str = ""
    context_tokens: int | None = None
