"""Opened episodes, answered steps, and what environments offer."""

from __future__ import annotations

from envfarm.core.episode import EnvironmentInfo, Opened, StepAnswer
from envfarm.core.messages import Diagnosis
from envfarm.core.sandbox import Isolation, SandboxProfile
from envfarm.wire.convert.enums import DIAGNOSIS_FROM_PB, ISOLATION_FROM_PB, ISOLATION_TO_PB, outcome_from_pb
from envfarm.wire.convert.messages import (
    assistant_from_pb,
    messages_from_pb,
    result_from_pb,
    schema_from_pb,
    schema_to_pb,
)
from envfarm.wire.convert.tasks import limits_from_pb, limits_to_pb, parts_from_pb, reward_from_pb, reward_to_pb
from envfarm.wire.v1 import episode_pb2, types_pb2


def info_to_pb(info: EnvironmentInfo) -> types_pb2.EnvironmentInfo:
    """Environment info to protobuf."""
    return types_pb2.EnvironmentInfo(
        name=info.name,
        version=info.version,
        description=info.description,
        tools=[schema_to_pb(t) for t in info.tools],
        limits=limits_to_pb(info.limits),
        reward=reward_to_pb(info.reward),
        system_prompt=info.system_prompt,
        catalogue=info.catalogue,
        isolation=ISOLATION_TO_PB[info.isolation],
        profile=profile_to_pb(info.profile),
    )


def profile_to_pb(profile: SandboxProfile) -> types_pb2.SandboxProfile:
    """Sandbox profile to protobuf."""
    return types_pb2.SandboxProfile(
        image=profile.image,
        isolation=ISOLATION_TO_PB[profile.isolation],
        cpus=profile.cpus,
        memory_bytes=profile.memory_bytes,
        disk_bytes=profile.disk_bytes,
        pids=profile.pids,
        network=profile.network,
        exec_seconds=profile.exec_seconds,
        output_bytes=profile.output_bytes,
    )


def profile_from_pb(pb: types_pb2.SandboxProfile) -> SandboxProfile:
    """Sandbox profile from protobuf."""
    return SandboxProfile(
        image=pb.image,
        isolation=ISOLATION_FROM_PB.get(pb.isolation, Isolation.BWRAP),
        cpus=pb.cpus,
        memory_bytes=pb.memory_bytes,
        disk_bytes=pb.disk_bytes,
        pids=pb.pids,
        network=pb.network,
        exec_seconds=pb.exec_seconds,
        output_bytes=pb.output_bytes,
    )


def info_from_pb(pb: types_pb2.EnvironmentInfo) -> EnvironmentInfo:
    """Environment info from protobuf."""
    return EnvironmentInfo(
        name=pb.name,
        version=pb.version,
        description=pb.description,
        tools=tuple(schema_from_pb(t) for t in pb.tools),
        limits=limits_from_pb(pb.limits),
        reward=reward_from_pb(pb.reward),
        system_prompt=pb.system_prompt,
        catalogue=pb.catalogue,
        isolation=ISOLATION_FROM_PB.get(pb.isolation, Isolation.NONE),
        profile=profile_from_pb(pb.profile) if pb.HasField("profile") else SandboxProfile(),
    )


def opened_from_pb(pb: episode_pb2.OpenResponse) -> Opened:
    """Opened episode from protobuf."""
    return Opened(
        handle=pb.handle,
        episode_id=pb.episode_id,
        messages=messages_from_pb(pb.messages),
        tools=tuple(schema_from_pb(t) for t in pb.tools),
        catalogue=pb.catalogue,
        limits=limits_from_pb(pb.limits),
        isolation=ISOLATION_FROM_PB.get(pb.isolation, Isolation.NONE),
        environment=pb.environment,
    )


def answer_from_pb(pb: episode_pb2.StepResponse) -> StepAnswer:
    """Answered step from protobuf."""
    return StepAnswer(
        index=pb.index,
        messages=messages_from_pb(pb.messages),
        results=tuple([result_from_pb(r) for r in pb.results]),
        parts=parts_from_pb(pb.parts),
        reward=pb.reward if pb.HasField("reward") else None,
        done=pb.done,
        outcome=outcome_from_pb(pb.outcome) if pb.HasField("outcome") else None,
        diagnosis=DIAGNOSIS_FROM_PB.get(pb.diagnosis, Diagnosis.NONE),
        seconds=pb.seconds,
        message=assistant_from_pb(pb.message) if pb.HasField("message") else None,
    )
