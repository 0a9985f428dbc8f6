"""Trying again while the other side is away, within one time budget."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from envfarm.core.deadline import Deadline
from envfarm.core.errors import Unavailable
from envfarm.wire.status import from_rpc

T = TypeVar("T")
FIRST_S = 0.05
MOST_S = 2.0


def backoff(attempt: int) -> float:
    """Seconds to wait after failed attempt number ``attempt`` (from 0): doubling, capped, with up to half of jitter."""
    return min(MOST_S, FIRST_S * 2.0 ** min(attempt, 16)) * random.uniform(0.5, 1.0)


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
