"""Connects a worker to gateway and engines, and lets signals end it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec

from envfarm.inference.pool import EnginePool
from envfarm.rollout.every_run import EveryRun
from envfarm.rollout.ports import PolicySide
from envfarm.rollout.tokens import load_token_builder
from envfarm.rollout.worker import Worker
from envfarm.wire.auth import read_token
from envfarm.wire.channel import connect, reach
from envfarm.wire.episode_client import EpisodeClient
from envfarm.wire.log_client import LogClient
from envfarm.wire.run_client import RunClient


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the flags of ``envfarm worker`` say. Without ``run_id``: every run."""

    gateway: str
    run_id: str
    engines: tuple[str, ...]
    folder: Path
    token_file: Path | None
    concurrency: int
    name: str
    renderer: str
    policy_name: str
    grace_s: float


async def serve(settings: WorkerSettings) -> None:
    """Work until the run is over or a signal comes. Raises the farm's errors."""
    tokens = await asyncio.to_thread(load_token_builder, settings.folder, renderer=settings.renderer)
    token = await asyncio.to_thread(read_token, settings.token_file)
    async with contextlib.AsyncExitStack() as stack:
        channel = connect(settings.gateway, token=token)
        stack.push_async_callback(channel.close)
        await reach(channel, settings.gateway)
        runs = RunClient(channel)
        if settings.run_id:
            await runs.get(settings.run_id)
        side = PolicySide(
            episodes=await stack.enter_async_context(EpisodeClient(channel)),
            engine=await stack.enter_async_context(EnginePool(settings.engines, connections=settings.concurrency)),
            tokens=tokens,
            log=await stack.enter_async_context(LogClient(channel)),
            name=settings.policy_name or settings.folder.resolve().name,
        )

        def worker(run_id: str) -> Worker:
            return Worker(
                side,
                runs,
                run_id=run_id,
                name=settings.name,
                concurrency=settings.concurrency,
                grace_s=settings.grace_s,
            )

        work = worker(settings.run_id) if settings.run_id else EveryRun(runs, worker)
        with _drained_by_signals(work):
            await work.run()


@contextlib.contextmanager
def _drained_by_signals(worker: Worker | EveryRun) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.drain)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
