"""Trajectories as rows: task, steps, outcome, reward parts, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from envfarm.core.trajectory import Trajectory
from envfarm.rollout.metrics import mean, part_sums


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
    means = [_number(mean(part_sums(t).get(name) for t in trajectories)) for name in names]
    tokens = str(sum(t.sampled_tokens for t in trajectories))
    grid.add_section()
    grid.add_row("mean", "", "", _number(mean(t.reward for t in trajectories)), *means, tokens, "", style="bold")
    return grid


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"
