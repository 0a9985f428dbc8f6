"""A run: one experiment with its settings, its state, and the tickets that let workers start groups."""

from __future__ import annotations

import enum

import msgspec

from envfarm.core.rewards import RewardSettings
from envfarm.core.task import Task
from envfarm.core.trajectory import Purpose

WORKERS_LABEL = "workers"
"""Label of a run whose maker brings the workers along: ``own``. Workers that serve every run leave it alone."""


class RunState(enum.StrEnum):
    """What a run is doing."""

    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed when the run is created. ``seed`` makes every group's seed; ``staleness`` is in policy versions.

    ``reward`` overrides the environment's own weights, caps and gamma where it is given. ``groups``: most groups that
    are handed out in all; ``None``: no end.
    """

    environment: str
    split: str = "train"
    seed: int = 0
    group_size: int = 8
    groups_per_version: int = 16
    staleness: int = 1
    temperature: float = 1.0
    purpose: Purpose = "train"
    max_attempts: int = 3
    reward: RewardSettings | None = None
    labels: dict[str, str] = {}
    groups: int | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run as the registry knows it. ``groups_issued`` and ``policy_version`` only ever grow."""

    id: str
    name: str
    settings: RunSettings
    state: RunState
    cause: str = ""  # who or what paused or stopped it
    policy_version: int = 0
    groups_issued: int = 0
    created_at: float = 0.0


class GroupTicket(msgspec.Struct, frozen=True, kw_only=True):
    """Leave to run the G episodes of one group. The seed follows from run, environment and index: nobody picks it."""

    group_id: str
    run_id: str
    index: int
    task: Task
    seed: int
    group_size: int


class MetricPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One value of one series. ``step`` is the trainer's version, or a count of the reporting process."""

    name: str
    step: int
    value: float
    at: float
    source: str
