"""Measure a policy on a split: one episode per task, whatever weights the engine serves at that moment."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from envfarm.core.errors import ConfigError
from envfarm.core.ids import derived_seed, new_id
from envfarm.core.rewards import RewardSettings
from envfarm.core.task import TASKS_PER_PAGE, Task
from envfarm.core.trajectory import Purpose, Trajectory
from envfarm.rollout.groups import GroupSpec, run_group
from envfarm.rollout.log_writer import LogWriter
from envfarm.rollout.metrics import completion, mean, part_sums
from envfarm.rollout.ports import Episodes, PolicySide
from envfarm.rollout.sampling import within_context
from envfarm.rollout.scheduling import InFlight


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Means are over episodes whose outcome is trainable, and over those of them where the thing was measured.

    ``parts`` are means of per-episode sums; ``versions`` are the oldest and newest policy version that sampled;
    ``steps``, ``tokens`` and ``outcomes`` are totals of all final attempts; ``seconds`` is wall time.
    """

    success: float | None
    judged: int
    reward: float | None
    parts: dict[str, float]
    outcomes: dict[str, int]
    steps: int
    tokens: int
    seconds: float
    versions: tuple[int, int] | None
    trajectories: tuple[Trajectory, ...]


async def evaluate(
    side: PolicySide,
    *,
    environment: str,
    split: str,
    count: int,
    seed: int = 0,
    temperature: float = 1.0,
    run_id: str = "",
    concurrency: int = 64,
    purpose: Purpose = "evaluate",
    max_attempts: int = 3,
    max_tokens: int | None = None,
    reward: RewardSettings | None = None,
    labels: dict[str, str] | None = None,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> Evaluation:
    """Run ``count`` episodes on the first tasks of ``split``, once more from the start where the split is shorter.

    ``seed`` fixes environments and sampling. ``max_tokens`` bounds one answer, beside the environment's own limit.
    ``on_trajectory`` sees every final trajectory as it ends. All attempts are durable in the log on return.
    Raises :class:`ConfigError` when there are no tasks, and :class:`LogError` when the log stays away.
    """
    started = time.monotonic()
    tasks = await _tasks(side.episodes, environment, split, count)
    side = await within_context(side)
    in_flight = InFlight(concurrency)
    final: list[Trajectory] = []
    async with LogWriter(side.log) as writer:

        async def finished(trajectory: Trajectory) -> None:
            await writer.put(trajectory)
            if trajectory.final:
                final.append(trajectory)
                if on_trajectory is not None:
                    on_trajectory(trajectory)

        async with asyncio.TaskGroup() as groups:
            for index in range(count):
                group = GroupSpec(
                    group_id=new_id("group"),
                    run_id=run_id,
                    size=1,
                    task=tasks[index % len(tasks)],
                    seed=derived_seed(seed, environment, split, index),
                    environment=environment,
                    split=split,
                    temperature=temperature,
                    purpose=purpose,
                    max_attempts=max_attempts,
                    reward=reward,
                    labels=labels or {},
                    max_tokens=max_tokens,
                )
                groups.create_task(run_group(group, side, in_flight, finished))
    return summarise(final, seconds=time.monotonic() - started)


def summarise(trajectories: Sequence[Trajectory], *, seconds: float) -> Evaluation:
    """The figures of final attempts."""
    trainable = [t for t in trajectories if t.outcome.trainable]
    judged = [value for t in trainable if (value := completion(t)) is not None]
    sums = [part_sums(t) for t in trainable]
    names = sorted({name for parts in sums for name in parts})
    versions = [int(v) for t in trajectories for s in t.segments for v in s.versions[s.mask == 1]]
    return Evaluation(
        success=mean(judged),
        judged=len(judged),
        reward=mean(t.reward for t in trainable),
        parts={name: found for name in names if (found := mean(p.get(name) for p in sums)) is not None},
        outcomes=dict(Counter(str(t.outcome) for t in trajectories).most_common()),
        steps=sum(len(t.steps) for t in trajectories),
        tokens=sum(t.sampled_tokens for t in trajectories),
        seconds=seconds,
        versions=(min(versions), max(versions)) if versions else None,
        trajectories=tuple(trajectories),
    )


async def _tasks(episodes: Episodes, environment: str, split: str, count: int) -> list[Task]:
    if count < 1:
        raise ConfigError(f"the number of episodes must be at least 1, got {count}")
    tasks: list[Task] = []
    while len(tasks) < count:
        wanted = min(TASKS_PER_PAGE, count - len(tasks))
        page = await episodes.tasks(environment, split, len(tasks), wanted)
        tasks += page
        if len(page) < wanted:
            break
    if not tasks:
        raise ConfigError(f"environment {environment!r} has no tasks in split {split!r}; see: envfarm env show")
    return tasks
