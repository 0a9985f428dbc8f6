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
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec
import numpy as np

from envfarm.core.engine import Engine
from envfarm.core.errors import ConfigError, DeadlineExceeded, FarmError, Unavailable
from envfarm.core.ids import derived_seed
from envfarm.wire.serving import announce
from trainer_bridge import checkpoint
from trainer_bridge.batches import minibatch_per_rank, rows_of, split
from trainer_bridge.checkpoint import Place
from trainer_bridge.feed import Feed
from trainer_bridge.former import Batch, BatchFormer
from trainer_bridge.learner import UpdateMetrics, UpdateShard
from trainer_bridge.model import write_policy
from trainer_bridge.orders import Learners
from trainer_bridge.ports import GroupLog, Runs
from trainer_bridge.publish import Publisher, version_after_start
from trainer_bridge.reporting import Reporter
from trainer_bridge.run_watch import RunWatch
from trainer_bridge.settings import TrainSettings
from trainer_bridge.stream import Decode, GroupStream

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

PUBLISH_GRACE_SECONDS = 10.0  # for engines to take a version once there is a reason to stop


class Trainer:
    """One training run, as rank 0 drives it. ``await Trainer(...).run()`` once."""

    def __init__(
        self,
        settings: TrainSettings,
        *,
        learners: Learners,
        groups: GroupLog,
        runs: Runs,
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
        self._place = Place(run_id=settings.run_id)
        self._sound = True  # weights and place belong together
        self._saved: Place | None = None
        self._saved_at = time.monotonic()
        self._early_stop = ""
        self._watch: RunWatch | None = None

    def stop(self, cause: str) -> None:
        """Finish the step at hand, save a checkpoint and return from :meth:`run`. Callable from signal handlers."""
        self._early_stop = cause
        if self._watch is not None:
            self._watch.stop(cause)

    async def run(self) -> Place:
        """Train until a reason to stop; returns where it ended. Raises ``FarmError`` with the cause of a failure.

        Whatever the reason, a checkpoint is saved first if weights and position belong together.
        """
        try:
            watch = self._watch = RunWatch(self._runs, await self._runs.get(self._settings.run_id))
            if self._early_stop:
                watch.stop(self._early_stop)
            try:
                async with asyncio.TaskGroup() as tasks:
                    follower = tasks.create_task(watch.follow(), name="run state")
                    try:
                        await self._train(watch)
                    finally:
                        follower.cancel()
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            await self._in_torch(self._learners.end)
        finally:
            self._torch.shutdown()
        return self._place

    async def _train(self, watch: RunWatch) -> None:
        await self._start(watch)
        await asyncio.to_thread(announce, self._settings.address_file, "ready")
        data = self._settings.data.for_run(watch.run.settings)
        source = self._groups.subscribe(
            self._settings.run_id, self._consumer, purpose=data.purpose, after=self._place.position
        )
        former = BatchFormer(data, self._settings.advantage)
        try:
            async with GroupStream(source, self._decode, after=self._place.position, prefetch=data.prefetch) as stream:
                await self._loop(Feed(stream, former, data, watch, self._meanwhile), watch)
        except FarmError:
            if self._sound:
                await self._checkpoint()
            raise
        await self._checkpoint()
        log.info("training ends at version %d after %d steps: %s", self._place.version, self._place.steps, watch.cause)

    async def _loop(self, feed: Feed, watch: RunWatch) -> None:
        while not self._done(watch):
            began = time.monotonic()
            batch = await feed.next(self._place.version, self._generator("batch"))
            if batch is None:
                return
            await self._step(batch, watch, idle=time.monotonic() - began)
            if time.monotonic() - self._saved_at >= self._settings.checkpoint_s:
                await self._checkpoint()

    def _done(self, watch: RunWatch) -> bool:
        steps = self._settings.steps
        if steps is not None and self._place.steps >= steps:
            watch.stop(f"{steps} steps are done")
        return watch.stopping

    @property
    def _consumer(self) -> str:
        purpose = self._settings.data.purpose
        return "trainer" if purpose == "train" else f"trainer-{purpose}"

    # Start: checkpoint, version, engines.

    async def _start(self, watch: RunWatch) -> None:
        found = await asyncio.to_thread(checkpoint.latest, self._checkpoints, self._settings.run_id)
        if found is not None and not self._settings.resume:
            raise ConfigError(f"{found[0]} is there already; add --resume to go on from it, or give another --out")
        if found is not None:
            folder, self._place = found
            await self._in_torch(self._learners.load, folder)
            self._saved = self._place
            log.info("resumed %s: version %d after %d steps", folder, self._place.version, self._place.steps)
        if self._has_engine:
            await self._align_engines(watch.run.policy_version)

    async def _align_engines(self, registered: int) -> None:
        """Make engines and registry agree with the weights that this trainer starts from."""
        version = version_after_start(registered, self._place.version)
        folder = self._publisher.folder(version)
        if version != self._place.version:
            log.info("the run is at version %d already: the starting weights go out as %d", registered, version)
            self._place = msgspec.structs.replace(self._place, version=version)
            await self._write_weights(folder)
        elif version == 0:
            folder = self._settings.policy
        elif not await asyncio.to_thread(folder.is_dir):
            await self._write_weights(folder)
        if await self._publisher.served() != {version}:
            await self._publisher.serve(folder, version)
        if registered != version:
            await self._publisher.announce(version)

    # One version.

    async def _step(self, batch: Batch, watch: RunWatch, *, idle: float) -> None:
        """Train on ``batch`` and publish what comes of it; one without anything to train only moves the position."""
        began = time.monotonic()
        shards = await asyncio.to_thread(self._shards, batch, watch.run.settings.temperature)
        if not shards:
            self._move_to(batch)
            await self._commit()
            log.info("no version from groups up to %d: %d wait, %s", batch.position, batch.carried, batch.drops)
            await self._reporter.points(self._place.version, {"train/dropped": float(self._place.dropped)})
            return
        self._sound = False
        metrics = await self._in_torch(self._learners.update, shards)
        self._move_to(batch, trained=len(batch.judged))
        self._sound = True
        updated = time.monotonic()
        version = self._place.version
        await _unless_stopping(watch, self._publisher.publish(version, self._write_weights))
        await self._commit()
        values = self._values(batch, metrics)
        values |= {
            "train/seconds": updated - began,
            "train/publish_seconds": time.monotonic() - updated,
            "train/idle_seconds": idle,
        }
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
            idle,
        )

    def _move_to(self, batch: Batch, *, trained: int = 0) -> None:
        made = 1 if trained else 0
        place = self._place
        self._place = msgspec.structs.replace(
            place,
            steps=place.steps + made,
            version=place.version + made,
            position=batch.position,
            trained=place.trained + trained,
            dropped=place.dropped + batch.drops.counted,
        )

    def _shards(self, batch: Batch, temperature: float) -> list[UpdateShard]:
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
                temperature=temperature,
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
        }

    async def _commit(self) -> None:
        """Tell the log; if it is away, the next commit says the same and more."""
        try:
            await self._groups.commit(self._settings.run_id, self._consumer, self._place.position)
        except (Unavailable, DeadlineExceeded) as error:
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

    async def _meanwhile(self, waited: float) -> None:
        """While waiting: the other ranks hear that this one lives, and the registry how long it has waited."""
        await self._in_torch(self._learners.idle)
        await self._reporter.points(self._place.version, {"train/idle_seconds": waited})

    def _generator(self, what: str) -> np.random.Generator:
        return np.random.default_rng(derived_seed(what, self._settings.seed, self._place.steps, self._place.position))

    def _in_torch(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._torch, lambda: function(*args, **kwargs))


async def _unless_stopping(watch: RunWatch, work: Coroutine[Any, Any, object]) -> None:
    """Run ``work``; once there is a reason to stop it has a short grace, then is given up with a warning."""
    task = asyncio.create_task(work)
    stop = asyncio.create_task(watch.wait_stopping(None))
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({task}, timeout=PUBLISH_GRACE_SECONDS)
        if task.done():
            await task
        else:
            log.warning("the last version is not served everywhere: %s", watch.cause)
    finally:
        task.cancel()
        stop.cancel()
        await asyncio.wait({task, stop})
