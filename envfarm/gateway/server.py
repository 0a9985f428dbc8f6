"""The gateway as a process: everything wired together, served until it is told to stop, drained, let go of."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc.aio
import msgspec
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from envfarm.core import plugins
from envfarm.core.sandbox import Backend
from envfarm.gateway.backends import make_backend
from envfarm.gateway.composition import Compositions
from envfarm.gateway.episode_service import EpisodeServicer
from envfarm.gateway.episodes import Episodes
from envfarm.gateway.farm_service import FarmServicer
from envfarm.gateway.handles import Signer
from envfarm.gateway.hosts import HostPools, host_pools
from envfarm.gateway.intake import TrajectoryServicer
from envfarm.gateway.run_service import RunServicer
from envfarm.gateway.state import StateFolder, state_folder
from envfarm.runs.registry import RunRegistry
from envfarm.trajectories.sqlite_log import SqliteLog
from envfarm.wire.auth import TokenInterceptor
from envfarm.wire.channel import serve_options
from envfarm.wire.serving import announce, bind
from envfarm.wire.v1 import (
    episode_pb2,
    episode_pb2_grpc,
    farm_pb2,
    farm_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
    trajectory_pb2,
    trajectory_pb2_grpc,
)

log = logging.getLogger(__name__)
SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (episode_pb2, "EpisodeService"),
        (trajectory_pb2, "TrajectoryService"),
        (run_pb2, "RunService"),
        (farm_pb2, "FarmService"),
    )
)
DRAIN_SECONDS = 15.0
CLOSE_SECONDS = 15.0


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the flags of ``envfarm gateway`` say. Without ``environments``: every registered one."""

    listen: str
    state: Path
    backend: str = "local"
    backend_options: Sequence[str] = ()
    environments: Sequence[str] = ()
    slots: int = 256
    hosts: int = 1
    address_file: Path | None = None
    keep_hosts: bool = False
    drain_seconds: float = DRAIN_SECONDS


async def run(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises the farm's errors when it cannot start."""
    stop = _Stop()
    with state_folder(settings.state) as folder:
        server = grpc.aio.server(options=serve_options(), interceptors=[TokenInterceptor(folder.token)])
        address = bind(server, settings.listen)
        try:
            async with _backend(settings) as backend:
                await _serve(stop, settings, folder, server, address, backend)
        except asyncio.CancelledError:
            if not stop.asked.is_set():
                raise


class _Stop:
    """SIGTERM and SIGINT: ends the start-up at once, and asks a gateway that serves to drain."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._starting = asyncio.current_task()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._ask)

    def _ask(self) -> None:
        if not self.asked.is_set():
            self.asked.set()
            if self._starting is not None:
                self._starting.cancel()

    def started(self) -> None:
        """From now on there is something to drain."""
        self._starting = None


async def _serve(
    stop: _Stop,
    settings: GatewaySettings,
    folder: StateFolder,
    server: grpc.aio.Server,
    address: str,
    backend: Backend,
) -> None:
    async with asyncio.TaskGroup() as tasks, host_pools(backend, hosts=settings.hosts) as pools:
        episodes = Episodes(pools, Signer(folder.key), Compositions(), tasks)
        async with _services(server, folder, episodes, pools) as healthy:
            await server.start()
            await asyncio.to_thread(announce, settings.address_file, address)
            log.info("serving at %s: %s", address, ", ".join(sorted(pools.served)))
            stop.started()
            gc.freeze()  # what is there now stays: no need for the collector to look through it again and again
            await stop.asked.wait()
            log.info("draining: no new episodes; steps in flight have %g s", settings.drain_seconds)
            await healthy.enter_graceful_shutdown()
            await episodes.drain(settings.drain_seconds, "this gateway is shutting down; send it again")
            await server.stop(0.5)


@contextlib.asynccontextmanager
async def _services(
    server: grpc.aio.Server, folder: StateFolder, episodes: Episodes, pools: HostPools
) -> AsyncIterator[health.aio.HealthServicer]:
    """All services, added to ``server``; log and registry are closed at the end."""
    async with contextlib.AsyncExitStack() as stack:
        trajectories = await asyncio.to_thread(SqliteLog, folder.database)
        stack.push_async_callback(trajectories.close)
        registry = await asyncio.to_thread(RunRegistry, folder.database, episodes)
        stack.push_async_callback(registry.close)
        episode_pb2_grpc.add_EpisodeServiceServicer_to_server(EpisodeServicer(episodes), server)
        trajectory_pb2_grpc.add_TrajectoryServiceServicer_to_server(TrajectoryServicer(trajectories), server)
        run_pb2_grpc.add_RunServiceServicer_to_server(RunServicer(registry), server)
        farm_pb2_grpc.add_FarmServiceServicer_to_server(FarmServicer(pools), server)
        healthy = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        for name in SERVICES:
            await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        yield healthy


@contextlib.asynccontextmanager
async def _backend(settings: GatewaySettings) -> AsyncIterator[Backend]:
    backend = make_backend(
        settings.backend,
        settings.state,
        environments=settings.environments or plugins.names("envfarm.environments"),
        slots=settings.slots,
        hosts=settings.hosts,
        options=settings.backend_options,
    )
    try:
        yield backend
    finally:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await backend.close(keep_hosts=settings.keep_hosts)
        except TimeoutError:
            log.error("the hosts did not end within %g s", CLOSE_SECONDS)  # noqa: TRY400 - the sentence is enough
