"""Trajectories as rows: task, steps, outcome, reward parts, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from envfarm.core.trajectory import Trajectory


def part_sums(trajectory: Trajectory) -> dict[str, float | None]:
    """Sum of every part over the steps; ``None`` when it was never measured."""
    sums: dict[str, float | None] = {}
    for step in trajectory.steps:
        for name, value in step.parts.items():
            before = sums.get(name)
            sums[name] = before if value is None else value + (before or 0.0)
    return sums


def as_row(trajectory: Trajectory) -> dict[str, Any]:
    """One trajectory for machines."""
    return {
        "trajectory": trajectory.id,
        "task": trajectory.task_id,
        "steps": len(trajectory.steps),
        "outcome": str(trajectory.outcome),
        "reward": trajectory.reward,
        "parts": part_sums(trajectory),
        "tokens": trajectory.sampled_tokens,
        "seconds": round(trajectory.ended_at - trajectory.started_at, 3),
        "isolation": trajectory.isolation.value,
    }


def table(trajectories: Sequence[Trajectory]) -> Table:
    """All trajectories for people; the last row has the means."""
    names = sorted({name for t in trajectories for name in part_sums(t)})
    grid = Table("task", "steps", "outcome", "reward", *names, "tokens", "seconds", padding=(0, 1), box=None)
    for trajectory in trajectories:
        row = as_row(trajectory)
        parts = [_number(row["parts"].get(name)) for name in names]
        grid.add_row(
            row["task"],
            str(row["steps"]),
            row["outcome"],
            _number(row["reward"]),
            *parts,
            str(row["tokens"]),
            f"{row['seconds']:.1f}",
        )
    rewards = [t.reward for t in trajectories if t.reward is not None]
    means = [_number(_mean([part_sums(t).get(name) for t in trajectories])) for name in names]
    tokens = str(sum(t.sampled_tokens for t in trajectories))
    grid.add_section()
    grid.add_row("mean", "", "", _number(_mean(list(rewards))), *means, tokens, "", style="bold")
    return grid


def _mean(values: Sequence[float | None]) -> float | None:
    measured = [v for v in values if v is not None]
    return sum(measured) / len(measured) if measured else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"
