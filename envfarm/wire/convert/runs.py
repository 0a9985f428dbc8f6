"""Runs, settings, tickets, metric points."""

from __future__ import annotations

from typing import cast

from envfarm.core.run import GroupTicket, MetricPoint, Run, RunSettings, RunState
from envfarm.core.trajectory import Purpose
from envfarm.wire.convert.enums import STATE_FROM_PB, STATE_TO_PB
from envfarm.wire.convert.tasks import reward_from_pb, reward_to_pb, task_from_pb, task_to_pb
from envfarm.wire.v1 import run_pb2

_PLAIN = ("environment", "split", "seed", "group_size", "groups_per_version", "staleness", "max_attempts")


def settings_to_pb(settings: RunSettings) -> run_pb2.RunSettings:
    """Run settings to protobuf."""
    return run_pb2.RunSettings(
        temperature=settings.temperature,
        purpose=settings.purpose,
        reward=reward_to_pb(settings.reward) if settings.reward is not None else None,
        labels=settings.labels,
        groups=settings.groups,
        **{field: getattr(settings, field) for field in _PLAIN},
    )


def settings_from_pb(pb: run_pb2.RunSettings) -> RunSettings:
    """Run settings from protobuf; fields left at zero where zero makes no sense get their defaults."""
    given = {f: getattr(pb, f) for f in _PLAIN if f in ("seed", "staleness") or getattr(pb, f)}
    return RunSettings(
        temperature=pb.temperature if pb.HasField("temperature") else 1.0,
        purpose=cast(Purpose, pb.purpose or "train"),
        reward=reward_from_pb(pb.reward) if pb.HasField("reward") else None,
        labels=dict(pb.labels),
        groups=pb.groups if pb.HasField("groups") else None,
        **given,
    )


def run_to_pb(run: Run) -> run_pb2.Run:
    """Run to protobuf."""
    return run_pb2.Run(
        id=run.id,
        name=run.name,
        settings=settings_to_pb(run.settings),
        state=STATE_TO_PB[run.state],
        cause=run.cause,
        policy_version=run.policy_version,
        groups_issued=run.groups_issued,
        created_at=run.created_at,
    )


def run_from_pb(pb: run_pb2.Run) -> Run:
    """Run from protobuf; an unknown state counts as paused."""
    return Run(
        id=pb.id,
        name=pb.name,
        settings=settings_from_pb(pb.settings),
        state=STATE_FROM_PB.get(pb.state, RunState.PAUSED),
        cause=pb.cause,
        policy_version=pb.policy_version,
        groups_issued=pb.groups_issued,
        created_at=pb.created_at,
    )


def ticket_to_pb(ticket: GroupTicket) -> run_pb2.GroupTicket:
    """Group ticket to protobuf."""
    return run_pb2.GroupTicket(
        group_id=ticket.group_id, index=ticket.index, task=task_to_pb(ticket.task), seed=ticket.seed
    )


def ticket_from_pb(pb: run_pb2.GroupTicket, run: Run) -> GroupTicket:
    """Group ticket from protobuf; the group size is the run's."""
    return GroupTicket(
        group_id=pb.group_id,
        run_id=run.id,
        index=pb.index,
        task=task_from_pb(pb.task),
        seed=pb.seed,
        group_size=run.settings.group_size,
    )


def point_to_pb(point: MetricPoint) -> run_pb2.MetricPoint:
    """Metric point to protobuf."""
    return run_pb2.MetricPoint(name=point.name, step=point.step, value=point.value, at=point.at, source=point.source)


def point_from_pb(pb: run_pb2.MetricPoint) -> MetricPoint:
    """Metric point from protobuf."""
    return MetricPoint(name=pb.name, step=pb.step, value=pb.value, at=pb.at, source=pb.source)
