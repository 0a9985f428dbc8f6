"""Errors to gRPC status and back, so that a cause keeps its class across processes.

The class travels as ``ErrorInfo.reason`` in ``google.rpc.Status``; batched replies carry the same ``Status``.
A hint when to try again travels as ``RetryInfo``.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from envfarm.core import errors

DOMAIN = "envfarm"
_TORN = "Internal error from Core"  # what grpc.aio says when a connection ends under a call that is being sent
_CODES: dict[type[errors.FarmError], grpc.StatusCode] = {
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PolicyError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ToolError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.EnvironmentCodeError: grpc.StatusCode.INTERNAL,
    errors.SandboxError: grpc.StatusCode.INTERNAL,
    errors.IsolationError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SlotLost: grpc.StatusCode.NOT_FOUND,
    errors.ProviderError: grpc.StatusCode.UNAVAILABLE,
    errors.EngineError: grpc.StatusCode.INTERNAL,
    errors.EngineAborted: grpc.StatusCode.CANCELLED,
    errors.LogError: grpc.StatusCode.INTERNAL,
    errors.LogFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.CorruptRecord: grpc.StatusCode.DATA_LOSS,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Rejected: grpc.StatusCode.PERMISSION_DENIED,
    errors.StepConflict: grpc.StatusCode.ABORTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_ALL: list[type[errors.FarmError]] = [errors.FarmError, errors.WireError, *_CODES]
_BY_REASON = {cls.code: cls for cls in _ALL}
_BY_CODE: dict[int, type[errors.FarmError]] = {
    grpc.StatusCode.UNAVAILABLE.value[0]: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED.value[0]: errors.DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED.value[0]: errors.Rejected,
    grpc.StatusCode.PERMISSION_DENIED.value[0]: errors.Rejected,
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]: errors.Unavailable,
    grpc.StatusCode.ABORTED.value[0]: errors.StepConflict,
    grpc.StatusCode.INVALID_ARGUMENT.value[0]: errors.ConfigError,
}


def code_of(error: BaseException) -> grpc.StatusCode:
    """The status code of ``error``; anything that is not ours is ``INTERNAL``."""
    for cls in type(error).__mro__:
        if cls in _CODES:
            return _CODES[cls]
    return grpc.StatusCode.INTERNAL


def to_status(error: BaseException) -> status_pb2.Status:
    """``google.rpc.Status`` with the error's class in an ``ErrorInfo`` and its hint in a ``RetryInfo``."""
    reason = error.code if isinstance(error, errors.FarmError) else "internal"
    text = str(error) if isinstance(error, errors.FarmError) else f"{type(error).__name__}: {error}"
    status = status_pb2.Status(code=code_of(error).value[0], message=text)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))
    if isinstance(error, errors.Unavailable) and error.retry_after_s is not None:
        hint = error_details_pb2.RetryInfo()
        hint.retry_delay.FromMilliseconds(int(error.retry_after_s * 1000))
        status.details.add().Pack(hint)
    return status


def from_status(status: status_pb2.Status) -> errors.FarmError:
    """The error that :func:`to_status` was made of, or the closest class by code."""
    error = _BY_CODE.get(status.code, errors.WireError)(status.message)
    info, hint = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN and info.reason in _BY_REASON:
            error = _BY_REASON[info.reason](status.message)
    for detail in status.details:
        if isinstance(error, errors.Unavailable) and detail.Unpack(hint):
            error.retry_after_s = hint.retry_delay.ToMilliseconds() / 1000
    return error


def from_rpc(error: grpc.RpcError) -> errors.FarmError:
    """The farm's error behind a failed gRPC call (aio or not)."""
    metadata = getattr(error, "trailing_metadata", lambda: None)() or ()
    for key, value in metadata:
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            status = status_pb2.Status()
            status.ParseFromString(value)
            return from_status(status)
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    details = error.details() if hasattr(error, "details") else str(error)
    if details == _TORN:
        return errors.Unavailable("the connection broke while the call began")
    return _BY_CODE.get(code.value[0], errors.WireError)(details or str(code))


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """End a unary or streamed call with ``error``, its class and hint included (see :func:`to_status`)."""
    status = to_status(error)
    details = (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(code_of(error), status.message, details)
    raise AssertionError("abort returned")  # pragma: no cover - abort always raises


@contextlib.asynccontextmanager
async def reported(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """The farm's errors that are raised inside end the call, by :func:`abort`."""
    try:
        yield
    except errors.FarmError as error:
        await abort(context, error)
