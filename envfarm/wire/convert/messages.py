"""Messages, calls, results, schemas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from envfarm.core.messages import (
    AssistantMessage,
    Diagnosis,
    Message,
    Role,
    ToolCall,
    ToolResult,
    ToolSchema,
    ToolStatus,
)
from envfarm.wire.convert.enums import DIAGNOSIS_FROM_PB, DIAGNOSIS_TO_PB, STATUS_FROM_PB, STATUS_TO_PB
from envfarm.wire.v1 import types_pb2


def call_to_pb(call: ToolCall) -> types_pb2.ToolCall:
    """Tool call to protobuf."""
    return types_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments)


def call_from_pb(pb: types_pb2.ToolCall) -> ToolCall:
    """Tool call from protobuf."""
    return ToolCall(pb.id, pb.name, pb.arguments)


def message_to_pb(message: Message) -> types_pb2.Message:
    """Chat message to protobuf."""
    return types_pb2.Message(
        role=message.role,
        content=message.content,
        tool_calls=[call_to_pb(c) for c in message.tool_calls],
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=message.reasoning,
    )


def message_from_pb(pb: types_pb2.Message) -> Message:
    """Chat message from protobuf."""
    calls = pb.tool_calls
    return Message(
        role=cast(Role, pb.role),
        content=pb.content,
        tool_calls=tuple([call_from_pb(c) for c in calls]) if calls else (),
        tool_call_id=pb.tool_call_id,
        name=pb.name,
        reasoning=pb.reasoning,
    )


def messages_from_pb(pbs: Iterable[types_pb2.Message]) -> tuple[Message, ...]:
    """Chat messages from protobuf."""
    return tuple([message_from_pb(pb) for pb in pbs])


def fill_assistant(pb: types_pb2.AssistantMessage, message: AssistantMessage) -> None:
    """Parsed assistant message into an empty ``pb``."""
    pb.content = message.content
    pb.reasoning = message.reasoning
    pb.diagnosis = DIAGNOSIS_TO_PB[message.diagnosis]
    pb.detail = message.detail
    for call in message.tool_calls:
        pb.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)


def assistant_from_pb(pb: types_pb2.AssistantMessage) -> AssistantMessage:
    """Parsed assistant message from protobuf; an ungraded one counts as ``ok`` with calls and ``none`` without."""
    calls = pb.tool_calls
    fallback = Diagnosis.OK if calls else Diagnosis.NONE
    return AssistantMessage(
        content=pb.content,
        reasoning=pb.reasoning,
        tool_calls=tuple([ToolCall(c.id, c.name, c.arguments) for c in calls]) if calls else (),
        diagnosis=DIAGNOSIS_FROM_PB.get(pb.diagnosis, fallback),
        detail=pb.detail,
    )


def result_to_pb(result: ToolResult) -> types_pb2.ToolResult:
    """Tool result to protobuf."""
    return types_pb2.ToolResult(
        call_id=result.call_id,
        name=result.name,
        status=STATUS_TO_PB[result.status],
        content=result.content,
        truncated=result.truncated,
        seconds=result.seconds,
    )


def result_from_pb(pb: types_pb2.ToolResult) -> ToolResult:
    """Tool result from protobuf."""
    return ToolResult(
        call_id=pb.call_id,
        name=pb.name,
        status=STATUS_FROM_PB.get(pb.status, ToolStatus.ERROR),
        content=pb.content,
        truncated=pb.truncated,
        seconds=pb.seconds,
    )


def schema_to_pb(schema: ToolSchema) -> types_pb2.ToolSchema:
    """Tool schema to protobuf."""
    return types_pb2.ToolSchema(
        name=schema.name,
        description=schema.description,
        parameters=schema.parameters,
        ends=schema.ends,
        timeout_s=schema.timeout_s,
    )


def schema_from_pb(pb: types_pb2.ToolSchema) -> ToolSchema:
    """Tool schema from protobuf."""
    return ToolSchema(
        name=pb.name,
        description=pb.description,
        parameters=pb.parameters,
        ends=pb.ends,
        timeout_s=pb.timeout_s if pb.HasField("timeout_s") else None,
    )
