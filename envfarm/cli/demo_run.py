"""The run behind ``envfarm demo``: measure, train until validation is good or time is up, measure again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live

from envfarm.cli.demo_display import Curves, line, render
from envfarm.cli.demo_summary import result_of, summary
from envfarm.cli.local_farm import LocalFarm, local_farm
from envfarm.cli.processes import Child
from envfarm.core.ids import new_id
from envfarm.core.run import MetricPoint, Run, RunSettings, RunState
from envfarm.inference.policies import shipped
from envfarm.inference.pool import EnginePool
from envfarm.rollout.evaluation import Evaluation, evaluate
from envfarm.rollout.ports import PolicySide
from envfarm.rollout.tokens import load_token_builder
from envfarm.wire.episode_client import EpisodeClient
from envfarm.wire.log_client import LogClient
from envfarm.wire.run_client import RunClient

#: Validation success at which training stops.
GOOD_ENOUGH = 0.96
VALIDATE_VERSIONS = 3  # measured every so many policy versions,
VALIDATE_SECONDS = 10.0  # or after so long, when a good policy leaves little to learn from
VALIDATION_TASKS = 128
TEST_TASKS = 240
#: The last measurement and an orderly end need this long.
RESERVED_SECONDS = 15.0
MOST_VERSIONS = 40
#: With shuffled rewards nothing is learnt, so validation never stops it: as many versions as the real run takes.
CONTROL_VERSIONS = 9
TRAINER_SECONDS = 120.0


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the flags of ``envfarm demo`` say."""

    out: Path
    seconds: float
    seed: int
    trainer_ranks: int
    shuffle_rewards: bool


async def run_demo(settings: DemoSettings, console: Console) -> dict[str, Any]:
    """Run the demo; returns the result as ``--json`` writes it."""
    policy = shipped("stockroom")
    run = _DemoRun(settings, console, policy)
    console.print("starting gateway, host and engine")
    async with local_farm(
        settings.out,
        environments=["stockroom"],
        policy=policy,
        engine_flags=["--threads", "1", "--seed", str(settings.seed)],
    ) as farm:
        return await run.through(farm)


class _DemoRun:
    """State of one demo: clock, curves, stage."""

    def __init__(self, settings: DemoSettings, console: Console, policy: Path) -> None:
        self._settings = settings
        self._console = console
        self._policy = policy
        self._started = time.monotonic()
        self._curves = Curves()
        self._stage = "starting"
        self._best: tuple[float, int] | None = None  # success on validation, and the version that had it

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._started

    async def through(self, farm: LocalFarm) -> dict[str, Any]:
        """Everything between the start of the farm and its end."""
        async with contextlib.AsyncExitStack() as stack:
            runs = RunClient(farm.channel)
            episodes = await stack.enter_async_context(EpisodeClient(farm.channel))
            log = await stack.enter_async_context(LogClient(farm.channel))
            engine = EnginePool(farm.engines)
            stack.push_async_callback(engine.close)
            tokens = await asyncio.to_thread(load_token_builder, self._policy)
            side = PolicySide(episodes=episodes, engine=engine, tokens=tokens, log=log, name="stockroom")
            run = await self._create(runs)
            trainer = await self._start_trainer(farm, run)
            await farm.start_worker(run.id, self._policy, concurrency=128)
            self._measure = _Measure(side, run, self._settings.seed)
            async with self._shown(runs, run):
                first = await self._first(trainer)
                await runs.set_state(run.id, RunState.RUNNING, "measured")
                await self._train(runs, run)
                await runs.set_state(run.id, RunState.STOPPED, "demo is over")
                chosen = await self._chosen(trainer, engine)
                last = await self._last()
                counts = await log.counts(run.id)
            result = result_of(self._curves, first, last, counts, chosen=chosen, wall_s=self._seconds)
            self._console.print(summary(result, self._settings.out, shuffled=self._settings.shuffle_rewards))
            return result

    async def _create(self, runs: RunClient) -> Run:
        settings = RunSettings(
            environment="stockroom",
            seed=self._settings.seed,
            group_size=8,
            groups_per_version=16,
            staleness=1,
            labels={"experiment": "demo"},
        )
        run = await runs.create("demo", settings, new_id("demo"))
        return await runs.set_state(run.id, RunState.PAUSED, "measuring the starting policy")

    async def _start_trainer(self, farm: LocalFarm, run: Run) -> Child:
        flags = ["--seed", str(self._settings.seed), "--ranks", str(self._settings.trainer_ranks), "--threads", "1"]
        flags += ["--steps", str(MOST_VERSIONS), "--keep", str(MOST_VERSIONS)]
        if self._settings.shuffle_rewards:
            flags.append("--shuffle-rewards")
        return await farm.start_trainer(run.id, self._policy, self._settings.out / "trainer", flags)

    async def _first(self, trainer: Child) -> Evaluation:
        self._stage = "measuring the starting policy"
        first = await self._measure("test", TEST_TASKS)
        self._stage = "waiting for the trainer"
        await trainer.ready(TRAINER_SECONDS)
        return first

    async def _train(self, runs: RunClient, run: Run) -> None:
        """Train until validation is good enough, the versions are used up, or time is."""
        self._stage = "training"
        most = CONTROL_VERSIONS if self._settings.shuffle_rewards else MOST_VERSIONS
        measured, measured_at = 0, time.monotonic()
        while self._seconds < self._settings.seconds - RESERVED_SECONDS:
            version = self._curves.run.policy_version if self._curves.run else 0
            long_ago = time.monotonic() - measured_at >= VALIDATE_SECONDS
            if version == measured or (version < measured + VALIDATE_VERSIONS and not long_ago):
                await asyncio.sleep(0.1)
                continue
            await self._validate(runs, run, version)
            measured, measured_at = version, time.monotonic()
            if version >= most or (self._best is not None and self._best[0] >= GOOD_ENOUGH):
                return

    async def _validate(self, runs: RunClient, run: Run, version: int) -> None:
        evaluation = await self._measure("validation", VALIDATION_TASKS)
        if evaluation.success is None or evaluation.versions is None:
            return
        if self._best is None or evaluation.success > self._best[0]:
            self._best = (evaluation.success, evaluation.versions[1])
        point = MetricPoint(
            name="evaluate/validation", step=version, value=evaluation.success, at=time.time(), source="demo"
        )
        await runs.report(run.id, [point])

    async def _chosen(self, trainer: Child, engine: EnginePool) -> int:
        """Have the engine serve the version that was best on validation; returns it, 0 when nothing was trained."""
        self._stage = "waiting for the trainer to end"
        async with asyncio.timeout(TRAINER_SECONDS):
            await trainer.process.wait()
        if self._best is None:
            return 0
        version = self._best[1]
        folder = self._settings.out / "trainer" / "weights" / f"v{version:06d}"
        if version and {s.version for s in await engine.status()} != {version}:
            await engine.update_weights_from_disk(str(folder), version=version, timeout=30.0)
        return version

    async def _last(self) -> Evaluation:
        self._stage = "measuring the trained policy"
        return await self._measure("test", TEST_TASKS)

    @contextlib.asynccontextmanager
    async def _shown(self, runs: RunClient, run: Run) -> AsyncIterator[None]:
        """Follow the run's metrics and keep the display up to date."""
        async with asyncio.TaskGroup() as group:
            follower = group.create_task(self._follow(runs, run.id))
            painter = group.create_task(self._paint())
            try:
                yield
            finally:
                follower.cancel()
                painter.cancel()

    async def _follow(self, runs: RunClient, run_id: str) -> None:
        async for state, points in runs.watch(run_id, history=True):
            self._curves.add(state, points)

    async def _paint(self) -> None:
        if not self._console.is_terminal:
            await self._tell()
            return
        with Live(console=self._console, refresh_per_second=4, transient=False) as live:
            while True:
                live.update(render(self._curves, stage=self._stage, seconds=self._seconds))
                await asyncio.sleep(0.25)

    async def _tell(self) -> None:
        """Where there is no terminal: one line now and then."""
        while True:
            text = line(self._curves, stage=self._stage, seconds=self._seconds)
            self._console.print(text, highlight=False, soft_wrap=True)
            await asyncio.sleep(5)


class _Measure:
    """Measures success at temperature 1 on a split, with whatever weights the engine serves."""

    def __init__(self, policy: PolicySide, run: Run, seed: int) -> None:
        self._policy = policy
        self._run = run
        self._seed = seed

    async def __call__(self, split: str, count: int) -> Evaluation:
        return await evaluate(
            self._policy,
            environment="stockroom",
            split=split,
            count=count,
            seed=self._seed,
            temperature=1.0,
            run_id=self._run.id,
            concurrency=128,
        )
