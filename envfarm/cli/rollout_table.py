"""Trajectories as rows: task, steps, outcome, reward parts, tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """All trajectories for people; the last row has the means. A part that no episode measured has no column."""
    names = sorted({name for t in trajectories for name, value in part_sums(t).items() if value is not None})
    grid = Table(padding=(0, 1), box=None)
    for title in ("task", "steps", "outcome", "reward", *names, "tokens", "seconds"):
        grid.add_column(title, justify="left" if title in ("task", "outcome") else "right", overflow="fold")
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
    grid.add_section()
    means = [_number(mean(part_sums(t).get(name) for t in trajectories)) for name in names]
    steps, tokens, seconds = (_mean(trajectories, of) for of in (_steps, _tokens, _seconds))
    reward = _number(mean(t.reward for t in trajectories))
    grid.add_row("mean", steps, "", reward, *means, tokens, seconds, style="bold")
    return grid


def _steps(trajectory: Trajectory) -> float:
    return len(trajectory.steps)


def _tokens(trajectory: Trajectory) -> float:
    return trajectory.sampled_tokens


def _seconds(trajectory: Trajectory) -> float:
    return trajectory.ended_at - trajectory.started_at


def _mean(trajectories: Sequence[Trajectory], of: Callable[[Trajectory], float]) -> str:
    value = mean(of(t) for t in trajectories)
    return "-" if value is None else f"{value:.1f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+z.2f}"
