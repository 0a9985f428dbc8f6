"""``envfarm rollout --gateway``: episodes in a farm that runs already."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing

from rich.console import Console

from envfarm.cli.rollout_run import ENGINE_SECONDS, RolloutSettings, episodes_of, run_settings
from envfarm.core.errors import ConfigError, DeadlineExceeded
from envfarm.core.ids import new_id
from envfarm.core.log import Group
from envfarm.core.run import Run, RunState
from envfarm.core.trajectory import Trajectory
from envfarm.inference.policies import resolve
from envfarm.inference.pool import EnginePool
from envfarm.trajectories.codec import decode
from envfarm.wire.auth import read_token
from envfarm.wire.channel import connect, reach
from envfarm.wire.episode_client import EpisodeClient
from envfarm.wire.log_client import LogClient
from envfarm.wire.run_client import RunClient

IDLE_SECONDS = 300.0
WORKER_SECONDS = 20  # a worker that serves every run asks for work all the time


async def run_remotely(settings: RolloutSettings, progress: Console) -> tuple[str, list[Trajectory]]:
    """Run the episodes; returns the id of the run and its trajectories in the order in which they ended.

    With engines they are driven from here. Without, the farm's workers run them.
    """
    if settings.train_steps:
        raise ConfigError("--train-steps needs a farm of its own; leave --gateway out, or start envfarm train there")
    if settings.max_tokens and not settings.engines:
        raise ConfigError("--max-tokens needs --engine with --gateway: the farm's own workers take no such limit")
    async with contextlib.AsyncExitStack() as stack:
        token = await asyncio.to_thread(read_token, settings.token_file)
        channel = connect(settings.gateway, token=token)
        stack.push_async_callback(channel.close)
        with progress.status(f"looking for {settings.gateway}"):
            await reach(channel, settings.gateway)
        async with EpisodeClient(channel) as episodes:
            await episodes.describe(settings.environment)  # an unknown one is told here, with what there is
        runs = RunClient(channel)
        if settings.engines:
            engine = await stack.enter_async_context(EnginePool(settings.engines))
            with progress.status(f"looking for {', '.join(settings.engines)}"):
                await engine.wait_ready(timeout=ENGINE_SECONDS)
            folder = await asyncio.to_thread(resolve, settings.policy)
            run = await runs.create("rollout", run_settings(settings, settings.environment), new_id("rollout"))
            work = episodes_of(run, settings, channel, engine, folder, progress)
        else:
            wanted = run_settings(settings, settings.environment, groups=settings.count, labels={})
            run = await runs.create("rollout", wanted, new_id("rollout"))
            log = await stack.enter_async_context(LogClient(channel))
            work = _followed(run, settings.count, log, runs, progress)
        try:
            return run.id, await work
        finally:
            await asyncio.shield(runs.set_state(run.id, RunState.STOPPED, "rollout is over"))


async def _followed(run: Run, count: int, log: LogClient, runs: RunClient, progress: Console) -> list[Trajectory]:
    """Trajectories of a run as its workers end them."""
    trajectories: list[Trajectory] = []
    with progress.status(f"0 of {count} episodes") as status:
        async with aclosing(log.subscribe(run.id, "rollout", purpose="collect", after=0)) as groups:
            try:
                while len(trajectories) < count:
                    async with asyncio.timeout(IDLE_SECONDS):
                        group = await (anext(groups) if trajectories else _first(groups, runs, run.id))
                    trajectories += [await asyncio.to_thread(decode, r.payload) for r in group.records]
                    status.update(f"{len(trajectories)} of {count} episodes")
            except TimeoutError:
                raise DeadlineExceeded(
                    f"no episode ended for {IDLE_SECONDS:g} s ({len(trajectories)} of {count} before that); does a "
                    "worker run there (envfarm worker without --run), and what does its log say?"
                ) from None
    return trajectories


async def _first(groups: AsyncGenerator[Group, None], runs: RunClient, run_id: str) -> Group:
    """The first group of a run. Raises :class:`DeadlineExceeded` soon when no worker takes anything of it."""
    coming = asyncio.ensure_future(anext(groups))
    try:
        for _ in range(WORKER_SECONDS):
            await asyncio.wait([coming], timeout=1.0)
            if coming.done() or (await runs.get(run_id)).groups_issued:
                return await coming
        raise DeadlineExceeded(
            f"no worker took an episode of this run within {WORKER_SECONDS} s; start one there (envfarm worker "
            "without --run), or give --engine to run the episodes from here"
        )
    finally:
        coming.cancel()
        await asyncio.wait([coming])
