"""The run behind ``envfarm rollout``."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
from rich.console import Console

from envfarm.cli.environments import located
from envfarm.cli.local_farm import LocalFarm, local_farm
from envfarm.core.errors import DeadlineExceeded
from envfarm.core.ids import new_id
from envfarm.core.run import WORKERS_LABEL, Run, RunSettings, RunState
from envfarm.core.trajectory import Trajectory
from envfarm.inference.policies import resolve
from envfarm.inference.pool import EnginePool
from envfarm.rollout.evaluation import evaluate
from envfarm.rollout.ports import PolicySide
from envfarm.rollout.tokens import load_token_builder
from envfarm.wire.episode_client import EpisodeClient
from envfarm.wire.log_client import LogClient
from envfarm.wire.run_client import RunClient

ENGINE_SECONDS = 10.0  # an engine that was named runs already

TRAINING_SECONDS_PER_STEP = 1800.0


class RolloutSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the flags of ``envfarm rollout`` say."""

    environment: str
    policy: str
    count: int
    split: str
    seed: int
    temperature: float
    out: Path
    engines: tuple[str, ...]
    concurrency: int
    max_tokens: int | None
    train_steps: int
    trainer_ranks: int
    backend: str = "local"
    backend_options: tuple[str, ...] = ()
    gateway: str = ""
    token_file: Path | None = None


async def run_rollout(settings: RolloutSettings, progress: Console) -> tuple[str, list[Trajectory]]:
    """Run the episodes; returns the id of the run and its trajectories in the order in which they ended."""
    environment = located(settings.environment)
    with progress.status(f"preparing the policy {settings.policy}"):
        folder = await asyncio.to_thread(resolve, settings.policy)
    async with contextlib.AsyncExitStack() as stack:
        if settings.engines:
            given = await stack.enter_async_context(EnginePool(settings.engines))
            with progress.status(f"looking for {', '.join(settings.engines)}"):
                await given.wait_ready(timeout=ENGINE_SECONDS)
        with progress.status("starting gateway, host and engine"):
            farm = await stack.enter_async_context(
                local_farm(
                    settings.out,
                    environments=[environment],
                    policy=None if settings.engines else folder,
                    slots=max(settings.concurrency, 1),
                    backend=settings.backend,
                    backend_options=settings.backend_options,
                    engine_flags=["--seed", str(settings.seed), "--max-rows", str(settings.concurrency)],
                )
            )
        engine = EnginePool(list(settings.engines) or farm.engines)
        stack.push_async_callback(engine.close)
        runs = RunClient(farm.channel)
        run = await runs.create("rollout", run_settings(settings, environment), new_id("rollout"))
        trajectories = await episodes_of(run, settings, farm.channel, engine, folder, progress)
        if settings.train_steps:
            with progress.status(f"{settings.train_steps} training steps on {settings.trainer_ranks} ranks"):
                await _train(farm, run.id, folder, settings)
            version = (await runs.get(run.id)).policy_version
            progress.print(_trained(version, settings), highlight=False, soft_wrap=True)
        await runs.set_state(run.id, RunState.STOPPED, "rollout is over")
        return run.id, trajectories


def run_settings(settings: RolloutSettings, environment: str, **more: Any) -> RunSettings:
    """The run that a rollout's episodes belong to; whoever makes it runs them, unless ``labels`` say otherwise."""
    labels = {WORKERS_LABEL: "own"}
    return RunSettings(
        environment=environment,
        split=settings.split,
        seed=settings.seed,
        group_size=1,
        purpose="collect",
        temperature=settings.temperature,
        **{"labels": labels, **more},
    )


async def episodes_of(
    run: Run, settings: RolloutSettings, channel: grpc.aio.Channel, engine: EnginePool, folder: Path, progress: Console
) -> list[Trajectory]:
    """Run the episodes from here, through the gateway at the other end of ``channel``."""
    trajectories: list[Trajectory] = []
    async with EpisodeClient(channel) as episodes, LogClient(channel) as log:
        with progress.status(f"0 of {settings.count} episodes") as status:

            def seen(trajectory: Trajectory) -> None:
                trajectories.append(trajectory)
                status.update(f"{len(trajectories)} of {settings.count} episodes")

            tokens = await asyncio.to_thread(load_token_builder, folder)
            await evaluate(
                PolicySide(episodes=episodes, engine=engine, tokens=tokens, log=log, name=settings.policy),
                environment=run.settings.environment,
                split=settings.split,
                count=settings.count,
                seed=settings.seed,
                temperature=settings.temperature,
                run_id=run.id,
                concurrency=settings.concurrency,
                purpose="collect",
                max_tokens=settings.max_tokens,
                on_trajectory=seen,
            )
    return trajectories


async def _train(farm: LocalFarm, run_id: str, policy: Path, settings: RolloutSettings) -> None:
    """Take the training steps and wait for the trainer to end."""
    # A learning rate for instruct models; the trainer's default is for the demo's tiny one.
    flags = ["--purpose", "collect", "--advantage", "batch", "--lr", "1e-5", "--seed", str(settings.seed)]
    flags += ["--steps", str(settings.train_steps), "--ranks", str(settings.trainer_ranks)]
    trainer = await farm.start_trainer(run_id, policy, settings.out / "trainer", flags)
    limit = TRAINING_SECONDS_PER_STEP * settings.train_steps
    try:
        async with asyncio.timeout(limit):
            status = await trainer.process.wait()
    except TimeoutError:
        raise DeadlineExceeded(f"{settings.train_steps} training steps took more than {limit:.0f} s") from None
    if status != 0:
        raise trainer.death()


def _trained(version: int, settings: RolloutSettings) -> str:
    """What came of the training steps; every step makes a version."""
    if version:
        return f"took {version} of {settings.train_steps} training steps; weights in {settings.out}/trainer/weights"
    return (
        f"took none of {settings.train_steps} training steps: episodes that all earn the same teach nothing; "
        f"try more of them with -n (what was dropped is in {settings.out}/logs/trainer.log)"
    )
