"""First contact with a host that was started, or found: does it serve, and is it the one it should be?"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc.aio

from envfarm.wire.channel import connect
from envfarm.wire.v1 import host_pb2, host_pb2_grpc

ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.01


async def announced(address_file: Path, ended: asyncio.Event, seconds: float) -> bool:
    """Wait until a host has written its address; ``False`` when it ``ended`` instead. Raises :class:`TimeoutError`."""
    async with asyncio.timeout(seconds):
        while not await asyncio.to_thread(address_file.exists):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):
                    await ended.wait()
            if ended.is_set():
                return False
    return True


async def inspected(address: str) -> host_pb2.InspectResponse | None:
    """What the host at ``address`` says of itself; ``None`` when nobody answers."""
    channel = connect(address)
    try:
        stub = host_pb2_grpc.HostServiceStub(channel)
        return await stub.Inspect(host_pb2.InspectRequest(), timeout=ANSWER_SECONDS, wait_for_ready=True)
    except grpc.aio.AioRpcError:
        return None
    finally:
        await channel.close()


async def answers(address: str, host_id: str) -> bool:
    """Whether the host called ``host_id`` answers at ``address``."""
    state = await inspected(address)
    return state is not None and state.host_id == host_id
