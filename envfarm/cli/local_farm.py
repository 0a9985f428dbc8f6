"""A whole farm on this machine: the same processes as in production, on loopback, under one folder of state."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from envfarm.cli.processes import Child, Processes, envfarm_argv, processes
from envfarm.wire.auth import read_token
from envfarm.wire.channel import connect

GATEWAY_SECONDS = 60.0
ENGINE_SECONDS = 180.0
DRAIN_SECONDS = 2.0  # when it ends, nobody is left who would read the answers of steps in flight


@dataclass
class LocalFarm:
    """A running farm. ``channel`` is an authenticated gRPC channel to its gateway."""

    state: Path
    processes: Processes
    gateway: str
    channel: grpc.aio.Channel
    engines: list[str] = field(default_factory=list)

    def client_flags(self) -> list[str]:
        """Flags with which another ``envfarm`` command reaches the gateway and the engines."""
        flags = ["--gateway", self.gateway, "--token-file", str(self.state / "token")]
        for url in self.engines:
            flags += ["--engine", url]
        return flags

    async def start_worker(self, run_id: str, tokenizer: Path, *, concurrency: int, name: str = "worker-0") -> Child:
        """A rollout worker for ``run_id``."""
        argv = envfarm_argv("worker", "--run", run_id, "--tokenizer", str(tokenizer), *self.client_flags())
        argv += ["--concurrency", str(concurrency), "--name", name]
        return await self.processes.start(name, argv, addressed=False, env=_ONE_THREAD)

    async def start_trainer(self, run_id: str, policy: Path, out: Path, flags: Sequence[str] = ()) -> Child:
        """The reference trainer for ``run_id``; ready when its model is loaded."""
        argv = envfarm_argv("train", "--run", run_id, "--policy", str(policy), "--out", str(out), *self.client_flags())
        return await self.processes.start("trainer", [*argv, *flags])


_ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@contextlib.asynccontextmanager
async def local_farm(
    state: Path,
    *,
    environments: Sequence[str],
    policy: Path | None,
    slots: int = 256,
    backend: str = "local",
    backend_options: Sequence[str] = (),
    engine_flags: Sequence[str] = (),
) -> AsyncIterator[LocalFarm]:
    """Start gateway, host and (with ``policy``) the embedded engine; everything ends with the context.

    ``backend`` makes the host, with ``backend_options`` as ``key=value``.
    """
    async with processes(state) as family:
        flags = ["--listen", "127.0.0.1:0", "--state", str(state), "--slots", str(slots)]
        flags += ["--drain-seconds", str(DRAIN_SECONDS)]
        flags += ["--backend", backend]
        for option in backend_options:
            flags += ["--backend-option", option]
        for name in environments:
            flags += ["--environment", name]
        gateway_child = await family.start("gateway", envfarm_argv("gateway", *flags))
        engine_child = None
        if policy is not None:
            argv = envfarm_argv("engine", "--model", str(policy), "--listen", "127.0.0.1:0", *engine_flags)
            engine_child = await family.start("engine", argv, env=_ONE_THREAD)
        gateway = await gateway_child.ready(GATEWAY_SECONDS)
        engines = [_url(await engine_child.ready(ENGINE_SECONDS))] if engine_child is not None else []
        channel = connect(gateway, token=await asyncio.to_thread(read_token, state / "token"))
        try:
            yield LocalFarm(state, family, gateway, channel, engines)
        finally:
            await channel.close()


def _url(address: str) -> str:
    return address if address.startswith("http") else f"http://{address}"
