"""Bearer tokens: read from a file, carried by every call, checked by the server before any handler sees the call.

The client side wraps the channel instead of using interceptors, since grpc.aio's stream interceptors put a queue and a
generator between a stream and its caller. Health checks need no token: probes have none.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc.aio

from envfarm.core.errors import ConfigError

HEADER = "authorization"
OPEN_SERVICES = ("/grpc.health.v1.Health/",)


def read_token(file: Path | None) -> str | None:
    """The token in a ``--token-file``; ``None`` without one. Does file I/O. Raises :class:`ConfigError`."""
    if file is None:
        return None
    try:
        return file.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"--token-file {file}: {error.strerror}; the gateway writes it into its --state folder"
        ) from error


def bearer(channel: grpc.aio.Channel, token: str) -> grpc.aio.Channel:
    """``channel``, with ``token`` in the metadata of every call."""
    return _BearerChannel(channel, token)


class _BearerChannel(grpc.aio.Channel):
    """Delegates everything; adds one metadata entry per call."""

    def __init__(self, inner: grpc.aio.Channel, token: str) -> None:
        self._inner = inner
        self._entry = (HEADER, f"Bearer {token}")

    def _with_token(self, multi: Callable[..., Any]) -> Any:
        def call(*args: Any, metadata: Sequence[tuple[str, str | bytes]] | None = None, **kwargs: Any) -> Any:
            return multi(*args, metadata=(*(metadata or ()), self._entry), **kwargs)

        return call

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._inner.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._inner.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._inner.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._inner.stream_stream(*args, **kwargs))

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    async def __aenter__(self) -> _BearerChannel:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._inner.__aexit__(kind, error, trace)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls through that carry ``token``; ends others with ``UNAUTHENTICATED``. No handler sees those."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See :class:`grpc.aio.ServerInterceptor`."""
        if handler_call_details.method.startswith(OPEN_SERVICES) or self._authentic(handler_call_details):
            return await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_refuse)

    def _authentic(self, details: grpc.HandlerCallDetails) -> bool:
        given = next((value for key, value in details.invocation_metadata or () if key == HEADER), "")
        raw = given if isinstance(given, bytes) else given.encode()
        return hmac.compare_digest(raw, self._expected)


async def _refuse(_request: Any, context: Any) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "no valid bearer token; expected the text of the server's token file in the metadata 'authorization: Bearer …' "
        "(commands take the file as --token-file; a gateway's is STATE/token)",
    )
