"""Groups: G episodes of one task that share a seed. An attempt that the farm failed is followed by another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from envfarm.core.rewards import RewardSettings
from envfarm.core.run import GroupTicket, Run
from envfarm.core.task import Task
from envfarm.core.trajectory import Purpose, StepRecord, Trajectory
from envfarm.rollout.episode import Episode, EpisodeSpec
from envfarm.rollout.ports import PolicySide
from envfarm.rollout.scheduling import InFlight
from envfarm.wire.retry import backoff

Finished = Callable[[Trajectory], Awaitable[None]]
OnStep = Callable[[StepRecord], None]


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the episodes of a group have in common."""

    group_id: str
    run_id: str
    size: int
    task: Task
    seed: int
    environment: str
    split: str
    temperature: float = 1.0
    purpose: Purpose = "train"
    max_attempts: int = 3
    reward: RewardSettings | None = None
    labels: dict[str, str] = {}
    max_tokens: int | None = None

    @classmethod
    def of(cls, ticket: GroupTicket, run: Run) -> GroupSpec:
        """The group that ``ticket`` gives leave to run."""
        settings = run.settings
        return cls(
            group_id=ticket.group_id,
            run_id=ticket.run_id,
            size=ticket.group_size,
            task=ticket.task,
            seed=ticket.seed,
            environment=settings.environment,
            split=settings.split,
            temperature=settings.temperature,
            purpose=settings.purpose,
            max_attempts=max(1, settings.max_attempts),
            reward=settings.reward,
            labels=settings.labels,
        )

    def episode(self, member: int, attempt: int) -> EpisodeSpec:
        """One attempt of one member."""
        return EpisodeSpec(
            run_id=self.run_id,
            group_id=self.group_id,
            group_size=self.size,
            member=member,
            attempt=attempt,
            last_attempt=attempt + 1 >= self.max_attempts,
            purpose=self.purpose,
            environment=self.environment,
            split=self.split,
            task=self.task,
            seed=self.seed,
            temperature=self.temperature,
            reward=self.reward,
            labels=self.labels,
            max_tokens=self.max_tokens,
        )


async def run_group(
    group: GroupSpec, side: PolicySide, in_flight: InFlight, finished: Finished, *, on_step: OnStep | None = None
) -> None:
    """Run all members of ``group``; every attempt goes to ``finished``, each member's last one with ``final``.

    Members wait for places independently, so a group need not fit at once.
    """

    async def run_member(member: int) -> None:
        for attempt in range(group.max_attempts):
            episode = Episode(group.episode(member, attempt), side, on_step=on_step)
            trajectory = await in_flight.run(episode)
            await finished(trajectory)
            if trajectory.final:
                return
            await asyncio.sleep(backoff(attempt))

    async with asyncio.TaskGroup() as members:
        for member in range(group.size):
            members.create_task(run_member(member), name=f"episode {group.group_id}.{member}")
