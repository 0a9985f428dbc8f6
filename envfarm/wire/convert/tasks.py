"""Tasks, limits, reward settings and parts."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from envfarm.core.messages import Message
from envfarm.core.rewards import RewardSettings
from envfarm.core.task import Limits, Task
from envfarm.wire.convert.messages import message_to_pb, messages_from_pb
from envfarm.wire.v1 import types_pb2


def task_to_pb(task: Task) -> types_pb2.Task:
    """Task to protobuf. Raises ``TypeError`` when ``data`` does not survive JSON."""
    prompt = (Message(role="user", content=task.prompt),) if isinstance(task.prompt, str) else task.prompt
    return types_pb2.Task(
        id=task.id,
        prompt=[message_to_pb(m) for m in prompt if task.prompt],
        seed=task.seed,
        files=task.files,
        data=msgspec.json.encode(task.data).decode(),
    )


def task_from_pb(pb: types_pb2.Task) -> Task:
    """Task from protobuf. A prompt of one user message comes back as text."""
    messages = messages_from_pb(pb.prompt)
    plain = len(messages) == 1 and messages[0] == Message(role="user", content=messages[0].content)
    return Task(
        id=pb.id,
        prompt=messages[0].content if plain else messages or "",
        seed=pb.seed,
        files=dict(pb.files),
        data=msgspec.json.decode(pb.data, type=dict) if pb.data else {},
    )


def limits_to_pb(limits: Limits) -> types_pb2.Limits:
    """Limits to protobuf."""
    return types_pb2.Limits(**msgspec.structs.asdict(limits))


def limits_from_pb(pb: types_pb2.Limits) -> Limits:
    """Limits from protobuf."""
    return Limits(**{field: getattr(pb, field) for field in Limits.__struct_fields__})


def reward_to_pb(settings: RewardSettings) -> types_pb2.RewardSettings:
    """Reward settings to protobuf."""
    return types_pb2.RewardSettings(weights=settings.weights, caps=settings.caps, gamma=settings.gamma)


def reward_from_pb(pb: types_pb2.RewardSettings) -> RewardSettings:
    """Reward settings from protobuf."""
    gamma = pb.gamma if pb.HasField("gamma") else 1.0
    return RewardSettings(weights=dict(pb.weights), caps=dict(pb.caps), gamma=gamma)


def parts_from_pb(pbs: Iterable[types_pb2.RewardPart]) -> dict[str, float | None]:
    """Reward parts from protobuf; absent stays ``None``."""
    return {pb.name: pb.value if pb.HasField("value") else None for pb in pbs}
