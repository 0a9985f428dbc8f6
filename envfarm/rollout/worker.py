"""The worker process: groups from the run's registry, episodes by the hundred, trajectories to the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import msgspec

from envfarm.core.errors import DeadlineExceeded, FarmError, Unavailable
from envfarm.core.run import RunState
from envfarm.core.trajectory import Trajectory
from envfarm.rollout.groups import GroupSpec, run_group
from envfarm.rollout.log_writer import LogWriter
from envfarm.rollout.metrics import Meter, points
from envfarm.rollout.ports import PolicySide, Runs
from envfarm.rollout.sampling import within_context
from envfarm.rollout.scheduling import InFlight
from envfarm.wire.retry import backoff

log = logging.getLogger(__name__)
ACQUIRE_SECONDS = 2.0
REPORT_SECONDS = 1.0
REPORT_WAIT_SECONDS = 5.0
STATUS_SECONDS = 30.0
GRACE_SECONDS = 20.0
_SHUTDOWN = "shutdown of the worker"


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Why things move or not. ``waiting_for``: what episodes wait for, counted; ``idle_for``: why no group starts."""

    open: int
    waiting_for: dict[str, int]
    longest: str
    idle_for: str
    unlogged: int
    log_trouble: str

    def __str__(self) -> str:
        waits = ", ".join(f"{count} for {what}" for what, count in self.waiting_for.items()) or "none"
        parts = [f"{self.open} open", f"waiting: {waits}", self.longest and f"longest: {self.longest}"]
        parts += [self.idle_for and f"no new group: {self.idle_for}", f"{self.unlogged} not yet logged"]
        return "; ".join(filter(None, [*parts, self.log_trouble and f"log: {self.log_trouble}"]))


class Worker:
    """Runs groups of one run until the run is stopped or :meth:`drain` is called.

    Back-pressure: a group is only asked for when a place is free, and finished trajectories that the log does not
    take hold theirs. On draining, episodes get ``grace_s`` seconds to end; then they are recorded as aborted.
    """

    def __init__(
        self,
        side: PolicySide,
        runs: Runs,
        *,
        run_id: str,
        name: str,
        concurrency: int = 128,
        grace_s: float = GRACE_SECONDS,
    ) -> None:
        self._side = side
        self._runs = runs
        self._run_id = run_id
        self._name = name
        self._grace_s = grace_s
        self._in_flight = InFlight(concurrency)
        self._writer = LogWriter(side.log)
        self._meter = Meter(time.monotonic())
        self._members = 0  # of groups that are not over
        self._group_size: int | None = None
        self._version = 0
        self._idle_for = "starting"
        self._place_free = asyncio.Event()
        self._draining = asyncio.Event()
        self._asking: asyncio.Timeout | None = None

    def drain(self) -> None:
        """Start no more groups, let those that run end within the grace time, then return from :meth:`run`.

        Called again, it aborts the episodes that still run. A gateway that is away does not hold it up for longer
        than the grace time and some seconds; trajectories that it did not take by then are lost, and said to be.
        """
        if self._draining.is_set():
            self._in_flight.abort_all(_SHUTDOWN)
        self._draining.set()
        self._place_free.set()
        self._writer.patience_s = min(self._writer.patience_s, self._grace_s)
        if self._asking is not None:
            self._asking.reschedule(asyncio.get_running_loop().time() + ACQUIRE_SECONDS)

    def status(self) -> WorkerStatus:
        """What this worker waits for."""
        longest = self._in_flight.longest()
        return WorkerStatus(
            open=self._in_flight.open,
            waiting_for=self._in_flight.waiting_for(),
            longest=f"{longest[0]} for {longest[1]} since {longest[2]:.1f} s" if longest else "",
            idle_for=self._idle_for,
            unlogged=self._writer.waiting,
            log_trouble=self._writer.trouble,
        )

    async def run(self) -> None:
        """Work. Raises :class:`FarmError` when the run is unknown or the log stays away for too long."""
        self._side = await within_context(self._side)
        async with asyncio.TaskGroup() as background:
            reporter = background.create_task(self._report(), name="metrics")
            try:
                async with self._writer:
                    await self._run_groups()
                await self._send_points()
            finally:
                reporter.cancel()

    async def _run_groups(self) -> None:
        abort: asyncio.TimerHandle | None = None
        try:
            async with asyncio.TaskGroup() as groups:
                await self._start_groups(groups)
                loop = asyncio.get_running_loop()
                abort = loop.call_later(self._grace_s, self._in_flight.abort_all, _SHUTDOWN)
        finally:
            if abort is not None:
                abort.cancel()

    async def _start_groups(self, groups: asyncio.TaskGroup) -> None:
        failures = 0
        while not self._draining.is_set():
            free = self._in_flight.concurrency - self._members
            if free <= 0:
                self._idle_for = self._writer.trouble or "every place is taken"
                self._place_free.clear()
                await self._place_free.wait()
                continue
            try:
                wanted = max(1, free // self._group_size) if self._group_size else 1
                async with asyncio.timeout(None) as self._asking:
                    answer = await self._runs.acquire(self._run_id, self._name, wanted, ACQUIRE_SECONDS)
                tickets, run, waiting_for = answer
            except (Unavailable, DeadlineExceeded, TimeoutError) as error:
                self._idle_for = str(error)
                await self._pause(backoff(failures))
                failures += 1
                continue
            finally:
                self._asking = None
            failures = 0
            self._idle_for = "" if tickets else waiting_for
            self._group_size = max(1, run.settings.group_size)
            self._version = max(self._version, run.policy_version)
            for ticket in tickets:
                self._members += ticket.group_size
                groups.create_task(self._run_group(GroupSpec.of(ticket, run)), name=f"group {ticket.group_id}")
            if run.state is RunState.STOPPED:
                log.info("run %s is over: %s", run.id, run.cause or "stopped")
                self._draining.set()

    async def _run_group(self, group: GroupSpec) -> None:
        await run_group(group, self._side, self._in_flight, self._finished, on_step=self._meter.step)

    async def _finished(self, trajectory: Trajectory) -> None:
        self._meter.trajectory(trajectory)
        await self._writer.put(trajectory)
        if trajectory.final:
            self._members -= 1
            self._place_free.set()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._draining.wait()

    async def _report(self) -> None:
        last_status = time.monotonic()
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            await self._send_points()
            if time.monotonic() - last_status >= STATUS_SECONDS:
                last_status = time.monotonic()
                log.info("%s", self.status())

    async def _send_points(self) -> None:
        """Best effort: curves may miss a second, episodes go on."""
        values = self._meter.take(time.monotonic())
        values["rollout/open_episodes"] = float(self._in_flight.open)
        step = max(self._version, self._meter.version)
        try:
            async with asyncio.timeout(REPORT_WAIT_SECONDS):
                await self._runs.report(self._run_id, points(values, step=step, at=time.time(), source=self._name))
        except (FarmError, TimeoutError) as error:
            log.debug("metrics of one second are lost: %s", error)
