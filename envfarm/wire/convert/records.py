"""Trajectory headers and log records."""

from __future__ import annotations

from typing import cast

from envfarm.core.log import Group, LogRecord
from envfarm.core.trajectory import Purpose, TrajectoryHeader
from envfarm.wire.convert.enums import outcome_from_pb, outcome_to_pb
from envfarm.wire.v1 import trajectory_pb2

_PLAIN = tuple(
    field
    for field in TrajectoryHeader.__struct_fields__
    if field not in ("outcome", "reward", "oldest_version", "purpose")
)


def record_to_pb(record: LogRecord) -> trajectory_pb2.TrajectoryRecord:
    """Log record to protobuf."""
    header = record.header
    pb = trajectory_pb2.TrajectoryHeader(
        outcome=outcome_to_pb(header.outcome),
        reward=header.reward,
        oldest_version=header.oldest_version,
        purpose=header.purpose,
        **{field: getattr(header, field) for field in _PLAIN},
    )
    return trajectory_pb2.TrajectoryRecord(header=pb, payload=record.payload)


def record_from_pb(pb: trajectory_pb2.TrajectoryRecord) -> LogRecord:
    """Log record from protobuf."""
    header = pb.header
    return LogRecord(
        header=TrajectoryHeader(
            outcome=outcome_from_pb(header.outcome),
            reward=header.reward if header.HasField("reward") else None,
            oldest_version=header.oldest_version if header.HasField("oldest_version") else None,
            purpose=cast(Purpose, header.purpose),
            **{field: getattr(header, field) for field in _PLAIN},
        ),
        payload=pb.payload,
    )


def group_from_pb(pb: trajectory_pb2.SubscribeResponse) -> Group:
    """A whole group from protobuf."""
    return Group(position=pb.position, group_id=pb.group_id, records=tuple(record_from_pb(r) for r in pb.records))


def group_to_pb(group: Group) -> trajectory_pb2.SubscribeResponse:
    """A whole group to protobuf."""
    return trajectory_pb2.SubscribeResponse(
        position=group.position, group_id=group.group_id, records=[record_to_pb(r) for r in group.records]
    )
