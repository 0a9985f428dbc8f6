"""From what a client sent to what a host may run: parse, bound, validate, grade. Pure, and silent whatever it gets.

A message that cannot be used becomes an observation for the model and a worse diagnosis, never an exception: the
policy's mistakes are data. Only a client's mistakes (no action, an unknown format) are errors.
"""

from __future__ import annotations

import msgspec

from envfarm.core.errors import ConfigError
from envfarm.core.messages import AssistantMessage, Diagnosis, ToolCall, ToolResult, ToolStatus
from envfarm.gateway.served import Served
from envfarm.tools.parsers import parse
from envfarm.wire.convert.messages import assistant_from_pb
from envfarm.wire.v1 import episode_pb2

_BADNESS = {
    Diagnosis.NONE: 0,
    Diagnosis.OK: 0,
    Diagnosis.UNKNOWN_TOOL: 1,
    Diagnosis.SCHEMA: 2,
    Diagnosis.SYNTAX: 3,
    Diagnosis.TRUNCATED: 4,
}
_UNREAD = (Diagnosis.SYNTAX, Diagnosis.TRUNCATED)
MALFORMED = "The tool call could not be read. Write it again in the form that was described."
CUT_OFF = "The message was cut off at the token limit before its tool call was complete. Write a shorter one."


class Admitted(msgspec.Struct):
    """A message with its final grade, and its calls split into those that run and those that are answered already.

    ``malformed`` is the user's answer to a message whose calls could not be read; empty otherwise.
    """

    message: AssistantMessage
    runnable: tuple[ToolCall, ...]
    invalid: tuple[ToolResult, ...] = ()
    malformed: str = ""


def admit(request: episode_pb2.StepRequest, served: Served) -> Admitted:
    """Admit the action of ``request``.

    Raises :class:`ConfigError` when it holds none or names an unknown format.
    """
    most = served.limits.message_bytes
    kind = request.WhichOneof("action")
    if kind == "message":
        message = assistant_from_pb(request.message)
        oversized = request.message.ByteSize() > most and _bytes(message) > most
    elif kind == "text":
        text = request.text.text
        oversized = request.text.ByteSize() > most and len(text.encode()) > most
        message = parse(request.text.format, "" if oversized else text, truncated=request.truncated)
    else:
        raise ConfigError(f"step {request.index} holds no action; expected 'message' or 'text'")
    if oversized:
        return _oversized(message, most)
    return _validated(_graded(message), served)


def _bytes(message: AssistantMessage) -> int:
    """Bytes of everything that the policy wrote."""
    calls = sum(len(c.name.encode()) + len(c.arguments.encode()) for c in message.tool_calls)
    return len(message.content.encode()) + len(message.reasoning.encode()) + calls


def _oversized(message: AssistantMessage, most: int) -> Admitted:
    detail = f"The message is longer than {most} bytes, so nothing of it was run. Write a shorter one."
    kept = AssistantMessage(content=message.content[:most], diagnosis=Diagnosis.SYNTAX, detail=detail)
    return Admitted(message=kept, runnable=(), malformed=detail)


def _graded(message: AssistantMessage) -> AssistantMessage:
    """Without calls, ``ok`` is ``none``; with calls, ``none`` is ``ok``. Call ids are made unique."""
    calls = message.tool_calls
    diagnosis = message.diagnosis
    if calls and diagnosis is Diagnosis.NONE:
        message = msgspec.structs.replace(message, diagnosis=Diagnosis.OK)
    elif not calls and _BADNESS[diagnosis] < _BADNESS[Diagnosis.SYNTAX] and diagnosis is not Diagnosis.NONE:
        message = msgspec.structs.replace(message, diagnosis=Diagnosis.NONE)
    if not all(c.id for c in calls) or (len(calls) > 1 and len({c.id for c in calls}) < len(calls)):
        renamed = tuple(msgspec.structs.replace(c, id=f"call_{i}") for i, c in enumerate(calls))
        message = msgspec.structs.replace(message, tool_calls=renamed)
    return message


def _validated(message: AssistantMessage, served: Served) -> Admitted:
    calls = message.tool_calls
    if len(calls) == 1 and served.limits.calls_per_step >= 1:  # the common case, without lists
        verdict = served.catalogue.check(calls[0])
        if verdict.ok:
            return Admitted(message, calls)
    if not calls:
        malformed = ""
        if message.diagnosis in _UNREAD:
            malformed = message.detail or (CUT_OFF if message.diagnosis is Diagnosis.TRUNCATED else MALFORMED)
        return Admitted(message, (), (), malformed)
    most = served.limits.calls_per_step
    if len(calls) > 2 * most:  # those far beyond the limit get no answer of their own, to bound the reply
        calls = calls[: 2 * most]
        message = msgspec.structs.replace(message, tool_calls=calls)
    return _split(message, served, most)


def _split(message: AssistantMessage, served: Served, most: int) -> Admitted:
    """Separate the calls that fit from the others, and let the worst of them worsen the grade."""
    runnable, invalid = [], []
    worst, detail = message.diagnosis, message.detail
    for position, call in enumerate(message.tool_calls):
        grade, why = Diagnosis.SCHEMA, f"Not run: a message may hold at most {most} calls."
        if position < most:
            verdict = served.catalogue.check(call)
            if verdict.ok:
                runnable.append(call)
                continue
            grade, why = verdict.diagnosis, verdict.detail
        invalid.append(ToolResult(call_id=call.id, name=call.name, status=ToolStatus.INVALID, content=f"error: {why}"))
        if _BADNESS[grade] > _BADNESS[worst]:
            worst, detail = grade, why
    if worst is not message.diagnosis:
        message = msgspec.structs.replace(message, diagnosis=worst, detail=detail)
    return Admitted(message, tuple(runnable), tuple(invalid))
