"""Hosts of one image: kept at their number, replaced when lost, shared out to episodes in the order in which they came.

What cannot be had has a cause and a time until which the backend is left alone; whoever wants a slot meanwhile is told
both at once, and nothing is needed for it to heal.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from envfarm.core.deadline import Deadline
from envfarm.core.errors import FarmError, Unavailable
from envfarm.core.pool import HostStatus, PoolState, PoolStatus
from envfarm.core.sandbox import Backend, Host, SandboxProfile
from envfarm.gateway.host_link import HostLink
from envfarm.gateway.tending import linked, tend
from envfarm.gateway.trouble import Trouble, refusal
from envfarm.wire.v1.host_pb2 import InspectResponse

log = logging.getLogger(__name__)
MOST_WAITING = 16_384
FIRST_SECONDS = 1.0
MOST_SECONDS = 300.0
YOUNG_SECONDS = 60.0  # a host that is lost before this age counts as one that cannot be had
FREE_DEATHS = 1  # so many young hosts in a row are replaced at once


class Register(Protocol):
    """Who is told of the hosts that come into use and leave it."""

    def took(self, link: HostLink, state: InspectResponse) -> None:
        """A host is in use from now on."""
        ...

    def lost(self, link: HostLink) -> None:
        """It is not any more; ``link.cause`` says why."""
        ...


class Pool:
    """Hosts whose commands see the files of ``image``; empty: their own system."""

    def __init__(
        self, image: str, size: int, backend: Backend, register: Register, profile: Callable[[], SandboxProfile]
    ) -> None:
        """``profile``: what its hosts must offer, asked for anew for each."""
        self.image = image
        self.size = size
        self.links: dict[str, HostLink] = {}
        self._backend = backend
        self._register = register
        self._profile = profile
        self._waiting: deque[asyncio.Future[HostLink]] = deque()
        self._trouble = Trouble(FIRST_SECONDS, MOST_SECONDS)
        self._young_deaths = 0
        self._making = asyncio.Lock()  # one at a time: what fails for one place fails for the others

    # Hosts

    async def take(self, host: Host) -> HostLink:
        """Take a host into use. Raises the farm's errors when it does not answer."""
        link, state = await linked(host)
        self.links[host.id] = link
        self._register.took(link, state)
        log.info("host %s serves %d slots at %s", host.id, link.slots, host.address)
        self._share_out()
        return link

    async def acquire(self) -> HostLink:
        """One more host. Raises the farm's errors when it cannot be had."""
        return await self.take(await self._backend.acquire(self._profile()))

    async def keep(self, link: HostLink | None) -> None:
        """Have a host in one place, for ever: ``link`` first, then whatever replaces it."""
        lost: HostLink | None = None
        while True:
            if link is None:
                link = await self._obtain(lost)
            born = time.monotonic()
            try:
                await tend(link, hurried=lambda: bool(self._waiting), reported=self._share_out)
            finally:
                self.links.pop(link.host.id, None)
                await link.__aexit__(None, None, None)
            self._register.lost(link)
            self._count_death(link, time.monotonic() - born)
            lost, link = link, None

    async def _obtain(self, lost: HostLink | None) -> HostLink:
        """A host in the place of ``lost``, however long it takes."""
        async with self._making:
            while True:
                await asyncio.sleep(self._trouble.left)
                try:
                    link = await (self._replace(lost) if lost is not None else self.acquire())
                except FarmError as error:
                    self._failed(str(error), getattr(error, "retry_after_s", None))
                except Exception as error:  # a backend may be anybody's: its fault must not end the others' hosts
                    log.exception("the backend failed unexpectedly")
                    self._failed(f"{type(error).__name__}: {error}", None)
                else:
                    if not self._young_deaths:
                        self._trouble.over()
                    return link
                lost = None  # what is left of it is the backend's to clear away

    async def _replace(self, lost: HostLink) -> HostLink:
        return await self.take(await self._backend.recycle(lost.host.id, lost.cause))

    def _count_death(self, link: HostLink, age: float) -> None:
        if age >= YOUNG_SECONDS:
            self._young_deaths = 0
            self._trouble.over()
            return
        self._young_deaths += 1
        if self._young_deaths > FREE_DEATHS:
            self._failed(
                f"{self._young_deaths} hosts in a row were lost within {YOUNG_SECONDS:.0f} s of their start, "
                f"the last one because {link.cause}",
                None,
            )

    def _failed(self, cause: str, hint: float | None) -> None:
        self._trouble.failed(cause, hint)
        log.error("%s: %s; tried again in %.0f s", self._name, cause, self._trouble.left)
        if not self.links:
            self._turn_away_all()

    # Slots

    async def seat(self, episode_id: str, deadline: Deadline, *, again: bool = False) -> HostLink:
        """A host with a slot to acquire, reserved for the caller until :meth:`seated`.

        Waits first come, first served (``again``: ahead of all, for one that was turned away by a host). Raises
        :class:`Unavailable` with the cause and a hint when none is free in time, or at once when no host can be had.
        """
        if not self.links and self._trouble:
            raise self._down()
        link = None if self._waiting and not again else self._freest(episode_id)
        if link is None:
            link = await self._wait(deadline, again)
        else:
            _reserve(link)
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

    def _freest(self, episode_id: str) -> HostLink | None:
        """By rendezvous hashing among those with room, so that a repeated open tends to find its first host."""
        free = [link for link in self.links.values() if link.free > 0]
        if len(free) > 1:
            return max(free, key=lambda x: hashlib.blake2b(f"{x.host.id} {episode_id}".encode()).digest())
        return free[0] if free else None

    async def _wait(self, deadline: Deadline, again: bool) -> HostLink:
        if len(self._waiting) >= MOST_WAITING:
            raise _busy(f"{MOST_WAITING} episodes wait for a slot already")
        place: asyncio.Future[HostLink] = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if again else self._waiting.append)(place)
        for link in self.links.values():
            link.hurry()
        try:
            async with asyncio.timeout(deadline.remaining()):
                return await place
        except TimeoutError:
            self._give_up(place)
            raise self._full() from None
        except asyncio.CancelledError:
            self._give_up(place)
            raise

    def _give_up(self, place: asyncio.Future[HostLink]) -> None:
        if place.done() and not place.cancelled():
            if place.exception() is None:
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
                _reserve(link)
                place.set_result(link)

    def _turn_away_all(self) -> None:
        for place in self._waiting:
            if not place.done():
                place.set_exception(self._down())
        self._waiting.clear()

    def _full(self) -> Unavailable:
        if not self.links:
            return _busy(f"the first host{self._of_image} is still being made")
        slots = sum(link.slots for link in self.links.values())
        return _busy(f"all {slots} slots of {len(self.links)} hosts{self._of_image} are busy")

    def _down(self) -> Unavailable:
        return refusal(f"there is no host{self._of_image}: {self._trouble.cause}", self._trouble.left)

    # What people see

    @property
    def _of_image(self) -> str:
        return f" of image {self.image!r}" if self.image else ""

    @property
    def _name(self) -> str:
        return f"hosts{self._of_image}"

    def status(self, environments: Iterable[str], foreign: Iterable[HostLink] = ()) -> PoolStatus:
        """How it does now. ``foreign``: hosts of other gateways that are shown along."""
        return PoolStatus(
            image=self.image,
            state=self._state(),
            wanted=self.size,
            hosts=tuple(_host_status(link) for link in (*self.links.values(), *foreign)),
            environments=tuple(environments),
            waiting=len(self._waiting),
            cause=self._trouble.cause if len(self.links) < self.size else "",
            retry_in_s=self._trouble.left if self._trouble and len(self.links) < self.size else None,
        )

    def _state(self) -> PoolState:
        if len(self.links) >= self.size:
            return PoolState.READY
        if self.links:
            return PoolState.SHORT
        return PoolState.DOWN if self._trouble else PoolState.STARTING


def combined(image: str, profiles: Iterable[SandboxProfile]) -> SandboxProfile:
    """What a host must offer so that episodes of all of ``profiles`` can sit in it.

    Its isolation is theirs if that is one; where they differ, the host decides for each when it is opened.
    """
    found = list(profiles)
    if not found:
        return SandboxProfile(image=image)
    levels = {profile.isolation for profile in found}
    return SandboxProfile(
        image=image,
        isolation=levels.pop() if len(levels) == 1 else SandboxProfile().isolation,
        cpus=max(p.cpus for p in found),
        memory_bytes=max(p.memory_bytes for p in found),
        disk_bytes=max(p.disk_bytes for p in found),
        pids=max(p.pids for p in found),
        network=any(p.network for p in found),
        exec_seconds=max(p.exec_seconds for p in found),
        output_bytes=max(p.output_bytes for p in found),
    )


def _reserve(link: HostLink) -> None:
    link.busy += 1
    link.acquiring += 1


def _busy(why: str) -> Unavailable:
    error = Unavailable(f"{why}; try again later, or give the gateway more --slots or --hosts")
    error.retry_after_s = 1.0
    return error


def _host_status(link: HostLink) -> HostStatus:
    return HostStatus(
        id=link.host.id,
        address=link.host.address,
        slots=link.slots,
        busy=max(0, min(link.busy, link.slots)),
        isolation=link.host.isolation,
        quarantined=link.quarantined,
        ours=link.ours,
    )
