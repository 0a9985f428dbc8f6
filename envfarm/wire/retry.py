"""Trying again while the other side is away, within one time budget: calls, and streams that have no end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar, cast

import grpc.aio

from envfarm.core.deadline import Deadline
from envfarm.core.errors import FarmError, LogFull, Unavailable, WireError
from envfarm.wire.status import from_rpc

T = TypeVar("T")
FIRST_SECONDS = 0.05
MOST_SECONDS = 2.0


def backoff(attempt: int) -> float:
    """Seconds to wait after failed attempt number ``attempt`` (from 0): doubling, capped, with up to half of jitter."""
    return min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** min(attempt, 16)) * random.uniform(0.5, 1.0)


async def retrying(call: Callable[[float], Awaitable[T]], *, timeout: float) -> T:
    """What ``call(remaining seconds)`` returns, sent again as long as it fails with :class:`Unavailable`.

    For calls whose repetition has no second effect. gRPC errors are turned into the farm's own. When the budget would
    not outlast the next pause, the last error is raised; every other error is raised at once.
    """
    deadline = Deadline.after(timeout)
    attempt = 0
    while True:
        try:
            return await _translated(call, deadline.remaining())
        except Unavailable as error:
            pause = max(backoff(attempt), error.retry_after_s or 0.0)
            if pause >= deadline.remaining():
                raise
        attempt += 1
        await asyncio.sleep(pause)


async def _translated(call: Callable[[float], Awaitable[T]], remaining: float) -> T:
    try:
        return await call(remaining)
    except grpc.RpcError as error:
        raise from_rpc(error) from error


def passing(error: FarmError) -> bool:
    """Whether the same request may go through later: nobody there, a full disk, or a connection that broke."""
    return isinstance(error, Unavailable | LogFull) or type(error) is WireError


async def following(
    start: Callable[[], grpc.aio.UnaryStreamCall[Any, T]], *, patience: float
) -> AsyncGenerator[T, None]:
    """Responses of a server's stream, from a new call whenever one breaks or ends; without end.

    ``start`` makes a call that goes on behind the last response. Raises the farm's error when it does not pass by
    itself, or when no server was there for ``patience`` seconds. Closing the iterator (``aclosing``) ends the call.
    """
    attempt, away = 0, Deadline.after(patience)
    while True:
        call = start()
        try:
            await call.initial_metadata()
            while (response := await call.read()) is not grpc.aio.EOF:
                attempt = 0
                yield cast(T, response)
                away = Deadline.after(patience)
        except grpc.RpcError as error:
            trouble = from_rpc(error)
            if not passing(trouble) or away.expired():
                raise trouble from error
        finally:
            call.cancel()
        await asyncio.sleep(backoff(attempt))
        attempt += 1
