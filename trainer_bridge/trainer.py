"""The loop on rank 0: groups, batch, update, new version, position, metrics; until there is a reason to stop.

::

    stream ─► window ─► update (all ranks) ─► weights on disk ─► engines ─► registry ─► commit ─► metrics
                 ▲                                                                          │
                 └──────────────────────────────────────────────────────────────────────────┘

Torch runs in one thread of its own; the event loop stays free for the network.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import msgspec
import numpy as np

from envfarm.core.engine import Engine
from envfarm.core.errors import ConfigError, Unavailable
from envfarm.core.ids import derived_seed
from envfarm.core.log import Group
from envfarm.core.run import Run, RunState
from envfarm.core.trajectory import Purpose
from trainer_bridge import checkpoint
from trainer_bridge.batches import minibatch_per_rank, rows_of, split
from trainer_bridge.checkpoint import Place
from trainer_bridge.former import Batch, BatchFormer
from trainer_bridge.learner import UpdateMetrics, UpdateShard
from trainer_bridge.model import write_policy
from trainer_bridge.orders import Learners
from trainer_bridge.publish import Publisher, VersionRegistry, version_after_start
from trainer_bridge.reporting import MetricSink, Reporter
from trainer_bridge.settings import TrainSettings
from trainer_bridge.stream import Decode, GroupStream

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

POLL_SECONDS = 0.5  # how late a pause, a stop or a signal may be seen
SAY_SECONDS = 10.0  # how often a waiting trainer says what it waits for
HEARTBEAT_SECONDS = 30.0  # how often waiting ranks hear from rank 0
OFFLINE_SECONDS = 30.0  # how long stored data may take to arrive before there is none


class GroupLog(Protocol):
    """The part of ``envfarm.wire.log_client.LogClient`` that training needs."""

    def subscribe(
        self, run_id: str, consumer: str, *, purpose: Purpose = "train", after: int | None = None
    ) -> AsyncIterator[Group]:
        """Whole groups in order, for ever."""
        ...

    async def commit(self, run_id: str, consumer: str, position: int) -> object:
        """Done up to ``position``."""
        ...


class RunRegistry(VersionRegistry, MetricSink, Protocol):
    """The part of ``envfarm.wire.run_client.RunClient`` that training needs."""

    async def get(self, run_id: str) -> Run:
        """The run as it is now."""
        ...


class Trainer:
    """One training run, as rank 0 drives it."""

    def __init__(
        self,
        settings: TrainSettings,
        *,
        learners: Learners,
        groups: GroupLog,
        runs: RunRegistry,
        engine: Engine | None,
        decode: Decode,
    ) -> None:
        self._settings = settings
        self._learners = learners
        self._groups = groups
        self._runs = runs
        self._decode = decode
        self._has_engine = engine is not None
        self._torch = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._publisher = Publisher(settings.out / "weights", settings.run_id, engine, runs, keep=settings.keep)
        self._reporter = Reporter(runs, settings.run_id, settings.out / "metrics.jsonl")
        self._checkpoints = settings.out / "checkpoints"
        self._stopping = asyncio.Event()
        self._stop_cause = ""
        self._place = Place(run_id=settings.run_id)
        self._saved: Place | None = None
        self._saved_at = time.monotonic()
        self._idle = 0.0
        self._run: Run

    @property
    def place(self) -> Place:
        """Where the trainer stands."""
        return self._place

    def stop(self, cause: str) -> None:
        """Finish the step at hand, save a checkpoint and return from :meth:`run`. Callable from signal handlers."""
        if not self._stopping.is_set():
            self._stop_cause = cause
            self._stopping.set()

    async def run(self) -> Place:
        """Train until a reason to stop; returns where it ended. Raises ``FarmError`` with the cause of a failure."""
        with ExitStack() as stack:
            stack.callback(self._torch.shutdown)
            try:
                async with asyncio.TaskGroup() as tasks:
                    self._run = await self._runs.get(self._settings.run_id)
                    follower = tasks.create_task(self._follow_run(), name="run state")
                    try:
                        await self._train()
                    finally:
                        follower.cancel()
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            await self._in_torch(self._learners.end)
        return self._place

    async def _train(self) -> None:
        await self._start()
        await asyncio.to_thread(self._say_ready)
        data = self._settings.data.for_run(self._run.settings)
        source = self._groups.subscribe(
            self._settings.run_id, self._consumer, purpose=data.purpose, after=self._place.position
        )
        former = BatchFormer(data, self._settings.advantage)
        async with GroupStream(source, self._decode, after=self._place.position, prefetch=data.prefetch) as stream:
            while (batch := await self._next_batch(stream, former)) is not None:
                await self._step(batch)
                if time.monotonic() - self._saved_at >= self._settings.checkpoint_s:
                    await self._checkpoint()
        await self._checkpoint()
        log.info("training ends at version %d after %d steps: %s", *self._where(), self._stop_cause)

    @property
    def _consumer(self) -> str:
        purpose = self._settings.data.purpose
        return "trainer" if purpose == "train" else f"trainer-{purpose}"

    def _where(self) -> tuple[int, int]:
        return self._place.version, self._place.steps

    # Start: checkpoint, version, engines.

    async def _start(self) -> None:
        found = None
        if self._settings.resume:
            found = await asyncio.to_thread(checkpoint.latest, self._checkpoints, self._settings.run_id)
        if found is not None:
            folder, self._place = found
            await self._in_torch(self._learners.load, folder)
            self._saved = self._place
            log.info("resumed %s: version %d after %d steps", folder, *self._where())
        elif await asyncio.to_thread(checkpoint.whole, self._checkpoints) and not self._settings.resume:
            raise ConfigError(
                f"{self._checkpoints} holds checkpoints; add --resume to go on from them, or give another --out"
            )
        if self._has_engine:
            await self._align_engines()

    async def _align_engines(self) -> None:
        """Make engines and registry agree with the weights that this trainer starts from."""
        version = version_after_start(self._run.policy_version, self._place.version)
        if version != self._place.version:
            log.info("the run is at version %d already: the starting weights go out as %d", version - 1, version)
            self._place = msgspec.structs.replace(self._place, version=version)
            await self._publisher.publish(version, self._write_weights)
        elif await self._publisher.served() != {version}:
            folder = self._publisher.folder(version)
            if version == 0:
                folder = self._settings.policy
            elif not folder.is_dir():
                await self._write_weights(folder)
            await self._publisher.serve(folder, version)

    def _say_ready(self) -> None:
        path = self._settings.address_file
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_text("ready\n")
            temporary.replace(path)

    # Waiting for data.

    async def _next_batch(self, stream: GroupStream, former: BatchFormer) -> Batch | None:
        """The next batch with something to train on; ``None`` when there is a reason to stop."""
        began = said = heard = last_group = time.monotonic()
        try:
            while not self._must_stop():
                now = time.monotonic()
                if now - said >= SAY_SECONDS:
                    said = now
                    await self._say_waiting(former, now - began)
                if now - heard >= HEARTBEAT_SECONDS:
                    heard = now
                    await self._in_torch(self._learners.idle)
                if self._run.state is RunState.PAUSED:
                    await self._pause()
                    continue
                if not former.full:
                    group = await stream.next(POLL_SECONDS)
                    if group is not None:
                        former.add(group)
                        last_group = time.monotonic()
                    elif self._exhausted(former, time.monotonic() - last_group):
                        return None
                if former.full or self._lingered(former, time.monotonic() - last_group):
                    batch = former.form(self._place.version, self._generator("batch"))
                    if batch.judged:
                        return batch
                    await self._skip(batch)
            return None
        finally:
            self._idle = time.monotonic() - began

    def _must_stop(self) -> bool:
        steps = self._settings.steps
        if steps is not None and self._place.steps >= steps:
            self.stop(f"{steps} steps are done")
        elif self._run.state is RunState.STOPPED:
            self.stop(f"the run was stopped ({self._run.cause or 'no cause given'})")
        return self._stopping.is_set()

    def _lingered(self, former: BatchFormer, silence: float) -> bool:
        linger = self._settings.data.linger_s
        return linger is not None and former.waiting > 0 and silence >= linger

    def _exhausted(self, former: BatchFormer, silence: float) -> bool:
        """Whether stored data has come to its end; without any at all that is the user's error."""
        if self._settings.data.linger_s is None or former.waiting or silence < OFFLINE_SECONDS:
            return False
        if not self._place.position:
            purpose = self._settings.data.purpose
            raise ConfigError(
                f"run {self._settings.run_id} has no whole group of purpose {purpose!r} in the log; "
                "expected at least one: collect some, or give another --purpose"
            )
        self.stop("the log holds nothing more")
        return True

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def _say_waiting(self, former: BatchFormer, seconds: float) -> None:
        if self._run.state is RunState.PAUSED:
            log.info(
                "the run is paused (%s); version %d waits", self._run.cause or "no cause given", self._place.version
            )
        else:
            log.info(
                "waiting for data since %.0f s: %d of %d groups for version %d",
                seconds,
                former.waiting,
                former.size,
                self._place.version + 1,
            )
        await self._reporter.points(self._place.version, {"train/idle_seconds": seconds})

    async def _skip(self, batch: Batch) -> None:
        """A window with nothing to learn from: it is done with, and no version comes of it."""
        self._place = msgspec.structs.replace(
            self._place, position=batch.position, dropped=self._place.dropped + batch.drops.counted
        )
        await self._commit()
        log.info("nothing to train on up to group %d: %s", batch.position, batch.drops)
        await self._reporter.points(self._place.version, {"train/dropped": float(self._place.dropped)})

    # One version.

    async def _step(self, batch: Batch) -> None:
        began = time.monotonic()
        shards = await asyncio.to_thread(self._shards, batch)
        if not shards:
            await self._skip(batch)
            return
        metrics = await self._in_torch(self._learners.update, shards)
        updated = time.monotonic()
        version = self._place.version + 1
        await self._publisher.publish(version, self._write_weights)
        self._place = msgspec.structs.replace(
            self._place,
            steps=self._place.steps + 1,
            version=version,
            position=batch.position,
            trained=self._place.trained + len(batch.judged),
            dropped=self._place.dropped + batch.drops.counted,
        )
        await self._commit()
        values = self._values(batch, metrics)
        values["train/seconds"] = updated - began
        values["train/publish_seconds"] = time.monotonic() - updated
        await self._reporter.report(version, values)
        log.info(
            "version %d: reward %s, loss %.4f, kl %.5f, %d trajectories, %d tokens, %.2f s (waited %.2f s)",
            version,
            "-" if batch.reward is None else f"{batch.reward:.3f}",
            metrics.loss,
            metrics.kl,
            len(batch.judged),
            metrics.tokens,
            updated - began,
            self._idle,
        )

    def _shards(self, batch: Batch) -> list[UpdateShard]:
        """Each rank's share of the update; empty when no token is to be trained."""
        compute, world = self._settings.compute, self._learners.world
        rows = [row for judged in batch.judged for row in rows_of(judged.trajectory, judged.advantages)]
        trained = max(1, compute.micro_logits // self._learners.learner.policy.vocabulary)
        cut = [
            minibatch_per_rank(part, world, tokens=compute.micro_tokens, trained=trained)
            for part in split(rows, compute.minibatches, self._generator("minibatch"))
        ]
        return [
            UpdateShard(
                number=self._place.steps,
                version=self._place.version,
                minibatches=tuple(per_rank[rank] for per_rank in cut),
                temperature=self._run.settings.temperature,
            )
            for rank in range(world if cut else 0)
        ]

    def _values(self, batch: Batch, metrics: UpdateMetrics) -> dict[str, float | None]:
        return {
            "train/loss": metrics.loss,
            "train/kl": metrics.kl,
            "train/entropy": metrics.entropy,
            "train/grad_norm": metrics.grad_norm,
            "train/clip_fraction": metrics.clip_fraction,
            "train/mismatch": metrics.mismatch,
            "train/mismatch_max": metrics.mismatch_max,
            "train/mismatch_current": metrics.mismatch_current,
            "train/staleness_max": float(max(batch.staleness)),
            "train/staleness_mean": float(np.mean(batch.staleness)),
            "train/trajectories": float(self._place.trained),
            "train/dropped": float(self._place.dropped),
            "train/reward": batch.reward,
            "train/idle_seconds": self._idle,
        }

    async def _commit(self) -> None:
        """Tell the log; if it is away, the next commit says the same and more."""
        try:
            await self._groups.commit(self._settings.run_id, self._consumer, self._place.position)
        except Unavailable as error:
            log.warning("position %d is not committed: %s", self._place.position, error)

    async def _write_weights(self, folder: Path) -> None:
        weights = await self._in_torch(self._learners.weights)
        await self._in_torch(write_policy, self._learners.learner.policy, weights, folder)

    async def _checkpoint(self) -> None:
        self._saved_at = time.monotonic()
        if self._saved == self._place:
            return
        folder = await asyncio.to_thread(checkpoint.begin, self._checkpoints, self._place)
        await self._in_torch(self._learners.save, folder)
        final = await asyncio.to_thread(
            checkpoint.finish, self._checkpoints, folder, self._place, keep=self._settings.keep
        )
        self._saved = self._place
        log.info("checkpoint %s", final)

    # The run's state.

    async def _follow_run(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                self._run = await self._runs.get(self._settings.run_id)
            except Unavailable as error:
                log.warning("the run's state is not known: %s", error)

    def _generator(self, what: str) -> np.random.Generator:
        return np.random.default_rng(derived_seed(what, self._settings.seed, self._place.steps, self._place.position))

    def _in_torch(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._torch, lambda: function(*args, **kwargs))
