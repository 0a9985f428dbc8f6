"""The pool of hosts: kept at its size, watched, and shared out to waiting episodes in the order in which they came."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from envfarm.core.deadline import Deadline
from envfarm.core.errors import ConfigError, DeadlineExceeded, FarmError, SandboxError, Unavailable
from envfarm.core.sandbox import Backend, Host, HostState, SandboxProfile
from envfarm.core.suggestions import did_you_mean
from envfarm.gateway.host_link import HostLink
from envfarm.gateway.served import Served
from envfarm.wire.retry import backoff
from envfarm.wire.v1.host_pb2 import InspectResponse

log = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 5.0
WAITING_HEARTBEAT_SECONDS = 0.5  # while somebody waits for a slot: leases end without the gateway being told
CHECKS = 3
CHECK_PAUSE_SECONDS = 0.2
INSPECT_SECONDS = 10.0
MOST_WAITING = 16_384
REMEMBERED_LOSSES = 256


class HostPool:
    """Hosts in use by id, and what they serve. Made by :func:`host_pool`."""

    def __init__(self, backend: Backend, tasks: asyncio.TaskGroup, hosts: int, profile: SandboxProfile) -> None:
        self.links: dict[str, HostLink] = {}
        self.served: dict[str, Served] = {}
        self._backend = backend
        self._tasks = tasks
        self._hosts = hosts
        self._profile = profile
        self._waiting: deque[asyncio.Future[HostLink]] = deque()
        self._lost: dict[str, str] = {}
        self._broken: dict[str, None] = {}  # why environments are not served, each cause once
        self._running: set[asyncio.Task[None]] = set()
        self._adopting = asyncio.Lock()

    async def start(self) -> None:
        """Adopt the hosts that live and start those that are missing. Raises :class:`SandboxError`."""
        for host in await self._backend.list():
            if host.state is HostState.READY:
                await self._add(host)
        for _ in range(self._hosts - len(self.links)):
            await self._add(await self._backend.acquire(self._profile))
        if not self.served:
            why = "; ".join(self._broken) or "none was asked for"
            raise SandboxError(f"no host serves any environment: {why}")
        self._run(self._watch(), "host watch")

    def stop(self) -> None:
        """Let go of every host. Those that wait for a slot are cancelled with their callers."""
        for task in self._running:
            task.cancel()

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._tasks.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _watch(self) -> None:
        """Follow what the backend reports, for ever."""
        async for host in self._backend.watch():
            link = self.links.get(host.id)
            if link is not None and host.state in (HostState.GONE, HostState.QUARANTINED):
                link.condemn(host.cause or host.state.value)

    def environment(self, name: str) -> Served:
        """What is known of an environment. Raises :class:`ConfigError` that lists what there is."""
        found = self.served.get(name)
        if found is None:
            hint = did_you_mean(name, self.served)
            raise ConfigError(f"no environment {name[:200]!r} here{hint} (there is: {', '.join(sorted(self.served))})")
        return found

    def loss(self, host_id: str) -> str:
        """Why a host is not in use."""
        return self._lost.get(host_id, f"host {host_id} is unknown here: it ended before this gateway started")

    def any(self) -> HostLink:
        """Some host, the emptiest. Raises :class:`Unavailable` when there is none at the moment."""
        if not self.links:
            raise self._busy("no host is up; one is being started")
        return max(self.links.values(), key=lambda link: link.free)

    async def seat(self, episode_id: str, deadline: Deadline, *, again: bool = False) -> HostLink:
        """A host with a slot to acquire, reserved for the caller until :meth:`seated`.

        Waits first come, first served (``again``: ahead of all, for one that was turned away by a host). Raises
        :class:`Unavailable` with the cause and a hint when none is free in time.
        """
        link = None if self._waiting and not again else self._freest(episode_id)
        if link is None:
            link = await self._wait(deadline, again)
        else:
            self._reserve(link)
        return link

    def seated(self, link: HostLink, *, taken: bool) -> None:
        """Ends a reservation: the slot was ``taken``, or is free again."""
        link.acquiring -= 1
        if not taken:
            self.freed(link)

    def freed(self, link: HostLink) -> None:
        """A slot of ``link`` was released."""
        link.busy = max(link.acquiring, link.busy - 1)
        self._share_out()

    def turned_away(self, link: HostLink) -> None:
        """Ends a reservation that the host did not honour: it is full, whatever was thought; its next report tells."""
        link.acquiring -= 1
        link.busy = link.slots

    def may_adopt(self, host_id: str) -> bool:
        """Whether a host that is not in use here may be one that another gateway made."""
        return host_id not in self._lost

    async def adopt(self, host_id: str, address: str) -> None:
        """Use a host that a signed handle names. When it does not answer it counts as lost."""
        async with self._adopting:
            if host_id in self.links or not self.may_adopt(host_id):
                return
            try:
                await self._add(Host(id=host_id, address=address, slots=0), ours=False)
            except FarmError as error:
                self._note_loss(host_id, f"it does not answer: {error}")

    def _reserve(self, link: HostLink) -> None:
        link.busy += 1
        link.acquiring += 1

    def _freest(self, episode_id: str) -> HostLink | None:
        """By rendezvous hashing among those with room, so that a repeated open tends to find its first host."""
        free = [link for link in self.links.values() if link.free > 0 and link.ours]
        if len(free) > 1:
            return max(free, key=lambda x: hashlib.blake2b(f"{x.host.id} {episode_id}".encode()).digest())
        return free[0] if free else None

    async def _wait(self, deadline: Deadline, again: bool) -> HostLink:
        if len(self._waiting) >= MOST_WAITING:
            raise self._busy(f"{MOST_WAITING} episodes wait for a slot already")
        place: asyncio.Future[HostLink] = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if again else self._waiting.append)(place)
        for link in self.links.values():
            link.hurry()
        try:
            async with asyncio.timeout(deadline.remaining()):
                return await place
        except TimeoutError:
            self._give_up(place)
            slots = sum(link.slots for link in self.links.values())
            raise self._busy(f"all {slots} slots of {len(self.links)} hosts are busy") from None
        except asyncio.CancelledError:
            self._give_up(place)
            raise

    def _give_up(self, place: asyncio.Future[HostLink]) -> None:
        if place.done() and not place.cancelled():
            self.seated(place.result(), taken=False)
        elif place in self._waiting:
            self._waiting.remove(place)

    def _share_out(self) -> None:
        while self._waiting:
            link = self._freest("")
            if link is None:
                return
            place = self._waiting.popleft()
            if not place.done():
                self._reserve(link)
                place.set_result(link)

    def _busy(self, why: str) -> Unavailable:
        error = Unavailable(f"{why}; try again later, or give the gateway more --slots or --hosts")
        error.retry_after_s = 1.0
        return error

    async def _add(self, host: Host, *, ours: bool = True) -> None:
        """Take ``host`` into use and tend it until it is lost. Raises the farm's errors when it does not answer."""
        if host.id in self.links:
            return
        link = HostLink(host, ours=ours)
        try:
            await link.__aenter__()
            state = await link.inspect(INSPECT_SECONDS)
            if state.host_id != host.id:
                raise SandboxError(f"at {host.address} answers host {state.host_id!r}, not {host.id!r}")
        except BaseException:
            await link.__aexit__(None, None, None)
            raise
        self._learn(host, state)
        link.report(state)
        self.links[host.id] = link
        self._lost.pop(host.id, None)
        self._run(self._tend(link), f"host {host.id}")
        log.info("host %s serves %d slots at %s", host.id, link.slots, host.address)
        self._share_out()

    def _learn(self, host: Host, state: InspectResponse) -> None:
        for pb in state.environments:
            known = self.served.get(pb.name)
            if known is None or known.pb != pb:
                self.served[pb.name] = Served(pb)
        for cause in state.broken:
            self._broken.setdefault(cause)
            log.warning("host %s: %s", host.id, cause)
        for cause in state.quarantined:
            log.warning("host %s has a slot in quarantine: %s", host.id, cause)

    async def _tend(self, link: HostLink) -> None:
        quarantined: list[str] = []
        try:
            while not link.given_up():
                suspected = await link.next_check(WAITING_HEARTBEAT_SECONDS if self._waiting else HEARTBEAT_SECONDS)
                if link.given_up():
                    break
                state = await self._check(link, urgent=suspected)
                if state is None:
                    break
                link.report(state)
                link.judge(alive=True)
                for cause in state.quarantined:
                    if cause not in quarantined:
                        log.warning("host %s: slot in quarantine: %s", link.host.id, cause)
                quarantined = list(state.quarantined)
                self._share_out()
        finally:
            self.links.pop(link.host.id, None)
            await link.__aexit__(None, None, None)
        await self._replace(link)

    async def _check(self, link: HostLink, *, urgent: bool) -> InspectResponse | None:
        """The host's report; ``None``, with the cause noted, when it does not answer."""
        for attempt in range(CHECKS):
            try:
                return await link.inspect(INSPECT_SECONDS)
            except (Unavailable, DeadlineExceeded) as error:
                cause = str(error)
            except FarmError as error:
                cause = str(error)
                log.warning("host %s: inspection failed: %s", link.host.id, error)
            if attempt + 1 < CHECKS and not link.cause:
                await asyncio.sleep(CHECK_PAUSE_SECONDS if urgent else CHECK_PAUSE_SECONDS * 5)
        link.cause = link.cause or f"it does not answer: {cause}"
        return None

    async def _replace(self, link: HostLink) -> None:
        host, cause = link.host, link.cause
        log.error("host %s is lost, with about %d episodes: %s", host.id, link.busy, cause)
        self._note_loss(host.id, cause)
        attempt = 0
        while link.ours:
            try:
                await self._add(await self._backend.recycle(host.id, cause))
                return
            except FarmError as error:
                log.error("host %s cannot be replaced yet: %s", host.id, error)  # noqa: TRY400 - the sentence is enough
            await asyncio.sleep(10 * backoff(attempt))
            attempt += 1

    def _note_loss(self, host_id: str, cause: str) -> None:
        if len(self._lost) >= REMEMBERED_LOSSES:
            self._lost.pop(next(iter(self._lost)))
        self._lost[host_id] = f"host {host_id} was lost: {cause}"


@contextlib.asynccontextmanager
async def host_pool(backend: Backend, *, hosts: int, profile: SandboxProfile | None = None) -> AsyncIterator[HostPool]:
    """A running pool of ``hosts`` hosts. The backend stays the caller's to close."""
    async with asyncio.TaskGroup() as tasks:
        pool = HostPool(backend, tasks, hosts, profile or SandboxProfile())
        try:
            await pool.start()
            yield pool
        finally:
            pool.stop()
