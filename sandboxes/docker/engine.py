"""The Docker Engine: the SDK's blocking calls, in threads of their own, each with a time-out. Never on a step's way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from docker import APIClient
from docker.constants import MINIMUM_DOCKER_API_VERSION as MINIMUM_API_VERSION
from docker.errors import DockerException
from docker.utils import kwargs_from_env, version_gte
from requests.exceptions import RequestException

from envfarm.core.errors import FarmError, SandboxError
from sandboxes.docker.errors import DockerUnreachable, engine_error
from sandboxes.docker.transport import mend

T = TypeVar("T")
CALL_SECONDS = 30.0
_MARGIN_SECONDS = 5.0
_THREADS = 16
_RELEASE_25 = "1.44"  # as a version of its API
_UNIX = ("unix:", "http+unix:", "/")
_DEFAULT_URL = "unix:///var/run/docker.sock"


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine says of itself. ``memory_bytes`` and ``cpus`` are the machine's.

    ``removes``: whether a container may be left to the engine to be removed at its end. With ``live-restore``,
    releases before 25 kill such a container when they start, although it outlived their absence.
    """

    memory_bytes: int
    cpus: int
    runtimes: frozenset[str]
    security: frozenset[str]
    machine: str
    removes: bool = True


class Engine:
    """One engine, at ``url`` (default: ``DOCKER_HOST``, else the usual socket). Use from one event loop."""

    def __init__(self, url: str = "") -> None:
        self.url = url or os.environ.get("DOCKER_HOST", "") or _DEFAULT_URL
        self._given = url
        self._threads = ThreadPoolExecutor(_THREADS, "docker")
        self._client: APIClient | None = None
        self._facts: EngineFacts | None = None
        self._version = ""
        self._connecting = threading.Lock()

    async def call(
        self,
        what: str,
        function: Callable[[APIClient], T],
        seconds: float = CALL_SECONDS,
        *,
        give_up: Callable[[], None] = lambda: None,
    ) -> T:
        """What ``function`` returns. Raises the farm's errors, ``what`` (doing …) in their sentence.

        When cancelled it returns once ``function`` has: what that made can then be cleared up. ``give_up`` asks a long
        one to end soon.
        """
        future = asyncio.get_running_loop().run_in_executor(self._threads, self._run, what, function)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # maybe nobody waits any more
        try:
            async with asyncio.timeout(seconds + _MARGIN_SECONDS):
                return await asyncio.shield(future)
        except TimeoutError:
            give_up()
            raise DockerUnreachable(
                f"{what}: the Docker Engine at {self.url} does not answer within {seconds:g} s; is it overloaded?"
            ) from None
        except asyncio.CancelledError:
            give_up()
            await asyncio.wait([future], timeout=seconds + _MARGIN_SECONDS)
            raise

    async def facts(self) -> EngineFacts:
        """What the engine says of itself, asked once in its life."""
        facts = self._facts
        if facts is None:
            facts = self._facts = await self.call("asking for the engine's properties", _facts)
        return facts

    def forget_facts(self) -> None:
        """It was away: its settings may have changed. From any thread."""
        self._facts = None

    def client(self) -> APIClient:
        """The SDK's client; blocking. Raises what the SDK raises."""
        with self._connecting:
            if self._client is None:
                self._client = self.connect()
            return self._client

    def connect(self) -> APIClient:
        """A client of one's own, for a stream that another thread may break off. Blocking."""
        options: dict[str, Any] = {"base_url": self._given} if self._given else kwargs_from_env()
        _knock(self.url)
        if not self._version:  # asked by hand: a client that asks itself and gets no answer leaks its socket
            with contextlib.closing(self._made(MINIMUM_API_VERSION, options)) as first:
                self._version = str(first.version(api_version=False)["ApiVersion"])
        return self._made(self._version, options)

    def close(self) -> None:
        """Let go of connections; threads that still wait for an answer end by themselves."""
        self._threads.shutdown(wait=False)
        if self._client is not None:
            self._client.close()

    def _made(self, version: str, options: Mapping[str, Any]) -> APIClient:
        client = APIClient(version=version, timeout=CALL_SECONDS, **options)
        if self.url.startswith(_UNIX):
            mend(client, socket_path(self.url))
        return client

    def _run(self, what: str, function: Callable[[APIClient], T]) -> T:
        try:
            _knock(self.url)
            return function(self.client())
        except FarmError:
            raise
        except (DockerException, RequestException, OSError) as error:
            raise engine_error(what, error, self.url) from error


def _knock(url: str) -> None:
    """Raises :class:`OSError` where nobody listens: the SDK would hide the cause."""
    if url.startswith(_UNIX):
        with socket.socket(socket.AF_UNIX) as knocking:
            knocking.settimeout(CALL_SECONDS)
            knocking.connect(socket_path(url))


def socket_path(url: str) -> str:
    """The unix socket of a local engine."""
    return "/" + url.removeprefix("http+").removeprefix("unix:").lstrip("/")


def local_url(url: str) -> None:
    """Raises :class:`SandboxError` unless the engine at ``url`` shares this machine's folders."""
    if not url.startswith(_UNIX):
        raise SandboxError(
            f"the Docker Engine at {url} is not on this machine: hosts are reached through sockets in a folder that "
            "gateway and containers share; run the gateway beside the engine"
        )


def _facts(client: APIClient) -> EngineFacts:
    info = client.info()
    return EngineFacts(
        memory_bytes=int(info.get("MemTotal") or 0),
        cpus=int(info.get("NCPU") or 1),
        runtimes=frozenset(info.get("Runtimes") or ()),
        security=frozenset(str(o).partition(",")[0].removeprefix("name=") for o in info.get("SecurityOptions") or ()),
        machine=str(info.get("ID") or ""),
        removes=not info.get("LiveRestoreEnabled") or version_gte(client.api_version, _RELEASE_25),
    )
