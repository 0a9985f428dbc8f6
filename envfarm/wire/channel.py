"""Channels and server options: message limit, keepalive, quick reconnects, no shared ports."""

from __future__ import annotations

import asyncio

import grpc.aio

from envfarm.core.errors import ConfigError, Unavailable
from envfarm.wire.auth import bearer
from envfarm.wire.serving import is_port

MESSAGE_BYTES = 64 * 1024 * 1024
REACH_SECONDS = 30.0
Options = list[tuple[str, int]]


def connect(address: str, *, token: str | None = None) -> grpc.aio.Channel:
    """A channel to ``unix:/path`` or ``host:port``; ``token`` goes with every call. Connects on first use.

    Must be called inside the event loop that will use it. Raises :class:`ConfigError` for an address of another shape.
    """
    if not address.startswith("unix:") and not is_port(address.rpartition(":")[2]):
        raise ConfigError(f"{address!r} is not an address; expected host:port or unix:/path")
    channel = grpc.aio.insecure_channel(address, options=channel_options())
    return bearer(channel, token) if token is not None else channel


async def reach(channel: grpc.aio.Channel, address: str, *, seconds: float = REACH_SECONDS) -> None:
    """Wait until the gateway at ``address`` takes connections. Raises :class:`Unavailable` that names it."""
    try:
        async with asyncio.timeout(seconds):
            await channel.channel_ready()
    except TimeoutError:
        raise Unavailable(
            f"no gateway answers at {address} for {seconds:g} s; is it running, and is that its address?"
        ) from None


def channel_options() -> Options:
    """Options of a client channel. Liveness is separate from traffic: pings go out while nothing is asked."""
    return [
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def serve_options() -> Options:
    """Options of a server. A port belongs to one server: gRPC's default would let a second one share it."""
    return [
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_concurrent_streams", 4_096),
        ("grpc.so_reuseport", 0),
    ]
