"""Episodes: the one implementation behind the unary calls and behind ``Interact``."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from envfarm.core.deadline import Deadline
from envfarm.core.errors import ConfigError, FarmError, SlotLost, Unavailable, WireError
from envfarm.core.ids import digest, new_id
from envfarm.core.rewards import RewardSettings
from envfarm.core.task import SPLITS, TASKS_PER_PAGE, Task
from envfarm.gateway.composition import Compositions
from envfarm.gateway.handles import Seat, Signer
from envfarm.gateway.host_link import RELEASE_SECONDS, HostLink, ignore
from envfarm.gateway.hosts import HostPools
from envfarm.gateway.liveness import touch
from envfarm.gateway.served import Served
from envfarm.gateway.steps import Known, StepDone, StepInFlight, fill_lost
from envfarm.wire.convert.tasks import limits_to_pb, reward_from_pb
from envfarm.wire.retry import backoff
from envfarm.wire.v1.episode_pb2 import (
    CloseRequest,
    CloseResponse,
    OpenRequest,
    OpenResponse,
    StepRequest,
    StepResponse,
    TouchRequest,
    TouchResponse,
)
from envfarm.wire.v1.host_pb2 import AcquireSlot, ReleaseSlot, SlotAcquired, SlotCommand

log = logging.getLogger(__name__)
QUERY_SECONDS = 30.0
QUEUE_SECONDS = 60.0
LONGEST_OPEN = 3600.0
REMEMBERED = 16_384  # episodes whose handle is not verified anew for every step
DRAIN_HINT_SECONDS = 2.0
MOST_PARTS = 64
T = TypeVar("T")


class Episodes:
    """Describes, opens, steps and closes. Holds nothing that the handles and the hosts do not hold as well."""

    def __init__(self, pool: HostPools, signer: Signer, compositions: Compositions, tasks: asyncio.TaskGroup) -> None:
        self._pool = pool
        self._signer = signer
        self._compositions = compositions
        self._tasks = tasks
        self._known: dict[str, Known] = {}
        self._opening: dict[str, Opening] = {}
        self._placed: dict[str, str] = {}  # episode → host, for opens that are sent again
        self._draining = ""
        self._idle = asyncio.Event()
        self.in_flight = 0

    # What there is

    def describe(self, environment: str = "") -> list[Served]:
        """One environment, or all of them by name. Raises :class:`ConfigError`."""
        if environment:
            return [self._pool.environment(environment)]
        return [served for _, served in sorted(self._pool.served.items())]

    async def tasks(self, environment: str, split: str, offset: int, limit: int) -> list[Task]:
        """A page of tasks; shorter than ``limit`` where the split ends. Raises :class:`ConfigError`."""
        self._pool.environment(environment)
        if split not in SPLITS:
            raise ConfigError(f"no split {split[:80]!r}; expected one of {', '.join(SPLITS)}")
        if not 1 <= limit <= TASKS_PER_PAGE:
            raise ConfigError(f"limit is {limit}; expected 1 to {TASKS_PER_PAGE} tasks a page")
        self._pool.blame.check(environment)
        link = self._pool.any()
        try:
            return await link.tasks(environment, split, offset, limit, QUERY_SECONDS)
        except Unavailable:
            if not await link.recovered():
                self._blame(link, environment)
            raise

    # Opening

    async def open(self, request: OpenRequest, timeout: float = 0.0) -> OpenResponse:
        """Start an episode; the same request id gets the same one. Waits in line for a slot."""
        self._refuse_when_draining()
        served = self._pool.environment(request.environment)
        _check_open(request)
        request_id = request.request_id or new_id("open")
        episode_id = f"ep-{digest(request_id.encode())}"
        opening = self._opening.get(episode_id)
        if opening is None:
            deadline = Deadline.after(_open_seconds(timeout, request, served))
            opening = Opening(self._tasks, self._open(episode_id, request, served, deadline), episode_id)
            self._opening[episode_id] = opening
            opening.task.add_done_callback(lambda _: self._opened(episode_id))
        return await opening.result()

    def _opened(self, episode_id: str) -> None:
        del self._opening[episode_id]
        self._note_idle()

    async def _open(self, episode_id: str, request: OpenRequest, served: Served, deadline: Deadline) -> OpenResponse:
        link, acquired = await self._acquire(episode_id, request, served, deadline)
        self._remember(self._placed, episode_id, link.host.id)
        seat = Seat(
            episode_id=episode_id,
            host_id=link.host.id,
            address=link.host.address,
            environment=served.info.name,
            version=served.info.version,
            expires_at=time.time() + served.handle_seconds,
            reward=reward_from_pb(request.reward) if request.HasField("reward") else None,
        )
        return OpenResponse(
            handle=self._signer.sign(seat),
            episode_id=episode_id,
            messages=acquired.messages,
            tools=served.pb.tools,
            catalogue=served.info.catalogue,
            limits=limits_to_pb(served.limits),
            isolation=acquired.isolation,
            environment=served.title,
        )

    async def _acquire(
        self, episode_id: str, request: OpenRequest, served: Served, deadline: Deadline
    ) -> tuple[HostLink, SlotAcquired]:
        """A slot that has been reset. Goes on to the next host when one is full after all or lost meanwhile."""
        attempt = 0
        while True:
            link = self._pool.links.get(self._placed.pop(episode_id, ""))  # set: this is a repeated open
            reserved = link is None
            if link is None:
                link = await self._pool.seat(served, episode_id, deadline, again=attempt > 0)
            try:
                command = _acquire_command(episode_id, request, served, deadline)
                reply = await link.call(command, deadline.remaining())
            except (Unavailable, SlotLost) as error:  # full after all, lost, or still closing an earlier opening
                if reserved:
                    self._pool.turned_away(link)
                log.info("episode %s: host %s turned it away: %s", episode_id, link.host.id, error)
                if not await self._settle(link, attempt, deadline, error):
                    self._blame(link, served.info.name)
                attempt += 1
            except BaseException:
                if reserved:
                    self._pool.seated(link, taken=False)
                self._release(link, episode_id)
                raise
            else:
                if reserved:
                    self._pool.seated(link, taken=True)
                return link, reply.acquired

    @staticmethod
    async def _settle(link: HostLink, attempt: int, deadline: Deadline, error: FarmError) -> bool:
        """After a host has turned an episode away: whether it lives; learns how full it is, and does not spin."""
        try:
            async with asyncio.timeout(deadline.remaining()):
                alive = await link.recovered()
                await asyncio.sleep(backoff(attempt))
                return alive
        except TimeoutError:
            raise error from None

    def _blame(self, link: HostLink, environment: str) -> None:
        """Note that something of ``environment`` was under way in a host that is lost."""
        self._pool.blame.note(link.host.id, environment, link.cause or "it left")

    def _release(self, link: HostLink, episode_id: str) -> None:
        """Free a slot that nobody will use. Should the host be away, its lease does it."""
        try:
            link.release(episode_id, ignore)
        except Unavailable as error:
            log.info("episode %s is left to its lease: %s", episode_id, error)

    # Stepping

    def step(self, request: StepRequest, response: StepResponse, timeout: float, done: StepDone) -> None:
        """Take a step: fill ``response``, then call ``done``; or call it with the error. Once, from the loop.

        Raises the farm's errors for requests that cannot be a policy's: forged handles, no action, while draining.
        """
        if self._draining:
            self._refuse_when_draining()
        known = self._known.get(request.handle)
        if known is None or known.seat.expires_at < time.time():
            seat = self._signer.verify(request.handle)
            if seat.host_id not in self._pool.links and self._pool.may_adopt(seat.host_id):
                self._tasks.create_task(self._step_elsewhere(seat, request, response, timeout, done), name="adopt")
                return
            known = self._learn(request.handle, seat)
        link = self._pool.links.get(known.seat.host_id)
        if link is None or known.served is None:
            fill_lost(response, request, self._pool.loss(known.seat.host_id), known.composition)
            done(None)
            return
        seconds = known.served.step_seconds
        if 0 < timeout < seconds:
            seconds = timeout

        def finished(error: FarmError | None) -> None:
            self.in_flight -= 1
            if self._draining:
                self._note_idle()
            done(error)

        ends = asyncio.get_running_loop().time() + seconds
        StepInFlight(known, known.served, request, response, ends, finished, self._recover).begin(link)
        self.in_flight += 1  # begin() never calls back before it returns

    async def _step_elsewhere(
        self, seat: Seat, request: StepRequest, response: StepResponse, timeout: float, done: StepDone
    ) -> None:
        """A step on a host that another gateway made."""
        await self._pool.adopt(seat.host_id, seat.address)
        try:
            self.step(request, response, timeout, done)
        except FarmError as error:
            done(error)
        except Exception as error:  # as on the direct way, a fault of ours ends this step and not the gateway
            log.exception("a step of episode %s failed unexpectedly", seat.episode_id)
            done(WireError(f"{type(error).__name__}: {error}"))

    def _learn(self, handle: str, seat: Seat) -> Known:
        served = self._pool.served.get(seat.environment)
        settings = seat.reward or (served.info.reward if served is not None else RewardSettings())
        known = Known(seat, served, self._compositions.of(settings))
        if served is not None:
            self._remember(self._known, handle, known)
        return known

    def _recover(self, step: StepInFlight) -> None:
        self._tasks.create_task(self._resend(step), name="step again")

    async def _resend(self, step: StepInFlight) -> None:
        lost = await step.resend()
        if lost is not None:
            self._blame(lost, step.environment)

    @staticmethod
    def _remember(memory: dict[str, T], key: str, value: T) -> None:
        if len(memory) >= REMEMBERED:
            memory.pop(next(iter(memory)))
        memory[key] = value

    # Closing

    async def close(self, request: CloseRequest, timeout: float = 0.0) -> CloseResponse:
        """End an episode and free its slot. One whose host is lost counts as closed. Raises :class:`Rejected`."""
        known = self._known.pop(request.handle, None)
        seat = known.seat if known is not None else self._signer.verify(request.handle)
        self._placed.pop(seat.episode_id, None)
        if request.reason:
            log.info("episode %s is closed before its end: %.200s", seat.episode_id, request.reason)
        link = self._pool.links.get(seat.host_id)
        if link is not None:
            command = SlotCommand(release=ReleaseSlot(episode_id=seat.episode_id))
            try:
                await link.call(command, min(timeout, RELEASE_SECONDS) if timeout > 0 else RELEASE_SECONDS)
            except Unavailable:
                if await link.recovered():
                    raise
            self._pool.freed(link)
        return CloseResponse()

    # Keeping

    async def touch(self, request: TouchRequest, timeout: float = 0.0) -> TouchResponse:
        """Renew the leases of episodes that are open; names those that are not any more."""

        def seat_of(handle: str) -> Seat:
            known = self._known.get(handle)
            return known.seat if known is not None else self._signer.verify(handle)

        seconds = min(timeout, QUERY_SECONDS) if timeout > 0 else QUERY_SECONDS
        return TouchResponse(gone=await touch(request.handles, seat_of, self._pool, seconds))

    # Draining

    async def drain(self, grace: float, why: str) -> None:
        """Refuse opens and steps from now on; wait for those in flight, at most ``grace`` seconds."""
        self._draining = why
        self._note_idle()
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d steps and %d opens did not end within %g s", self.in_flight, len(self._opening), grace)
        for opening in self._opening.values():
            opening.task.cancel()

    def _note_idle(self) -> None:
        if self._draining and not self.in_flight and not self._opening:
            self._idle.set()

    def _refuse_when_draining(self) -> None:
        if self._draining:
            error = Unavailable(self._draining)
            error.retry_after_s = DRAIN_HINT_SECONDS
            raise error


class Opening:
    """One episode being opened, for everybody who asked for it; ends when nobody waits for it any more."""

    def __init__(self, tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, OpenResponse], episode_id: str) -> None:
        self.task = tasks.create_task(self._settled(work), name=f"open {episode_id}")
        self._waiting = 0

    @staticmethod
    async def _settled(work: Coroutine[Any, Any, OpenResponse]) -> OpenResponse | Exception:
        try:
            return await work
        except Exception as error:  # of those who wait, not of the group that the task runs in
            return error

    async def result(self) -> OpenResponse:
        """The opened episode. Raises what kept it from opening."""
        self._waiting += 1
        try:
            result = await asyncio.shield(self.task)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self.task.cancel()
        if isinstance(result, Exception):
            raise result
        return result


def _open_seconds(timeout: float, request: OpenRequest, served: Served) -> float:
    given = [t for t in (timeout, request.timeout_s) if t > 0]
    return min([*given, LONGEST_OPEN]) if given else QUEUE_SECONDS + served.limits.reset_seconds


def _acquire_command(episode_id: str, request: OpenRequest, served: Served, deadline: Deadline) -> SlotCommand:
    return SlotCommand(
        acquire=AcquireSlot(
            episode_id=episode_id,
            environment=request.environment,
            task=request.task,
            seed=request.seed,
            timeout_s=min(0.95 * deadline.remaining(), served.limits.reset_seconds),  # the host's own error comes first
            lease_s=request.lease_s,
        )
    )


def _check_open(request: OpenRequest) -> None:
    """Raises :class:`ConfigError` for what no environment could start from."""
    if not request.task.id:
        raise ConfigError("the task has no id; expected one that Tasks returned, or one with an id of its own")
    try:
        msgspec.json.decode(request.task.data or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"task {request.task.id[:80]!r}: data is not the JSON text of an object: {error}") from None
    settings = request.reward
    if len(settings.weights) > MOST_PARTS or len(settings.caps) > MOST_PARTS:
        raise ConfigError(f"more than {MOST_PARTS} reward parts are weighted or capped")
    for name, value in [*settings.weights.items(), *settings.caps.items(), ("gamma", settings.gamma)]:
        if not math.isfinite(value) or len(name) > 64:
            raise ConfigError(f"reward settings: {name[:64]!r} is {value}; expected a finite number under a short name")
