"""All hosts in use: one pool for the machine's own system, which describes every environment, and one for each image.

An environment that names an image sits only in hosts of that image. A pool that cannot be had stops none of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from typing import Any

from envfarm.core.deadline import Deadline
from envfarm.core.errors import ConfigError, FarmError, SandboxError, Unavailable
from envfarm.core.pool import FarmStatus, LostHost
from envfarm.core.sandbox import Backend, Host, HostState, SandboxProfile
from envfarm.core.suggestions import did_you_mean
from envfarm.gateway.blame import Blame
from envfarm.gateway.host_link import HostLink
from envfarm.gateway.pool import Pool, combined
from envfarm.gateway.served import Served
from envfarm.gateway.tending import linked, tend
from envfarm.wire.v1.host_pb2 import InspectResponse

log = logging.getLogger(__name__)
REMEMBERED_LOSSES = 256
SHOWN_LOSSES = 10


class HostPools:
    """Hosts in use by id, of every pool, and what they serve. Made by :func:`host_pools`."""

    def __init__(self, backend: Backend, tasks: asyncio.TaskGroup, hosts: int) -> None:
        self.links: dict[str, HostLink] = {}
        self.served: dict[str, Served] = {}
        self.blame = Blame()
        self._backend = backend
        self._tasks = tasks
        self._hosts = hosts
        self._default = Pool("", hosts, backend, self, SandboxProfile)
        self._pools = {"": self._default}
        self._adopted: dict[str, list[Host]] = {}  # by image, until their pool exists
        self._lost: dict[str, str] = {}
        self._broken: dict[str, None] = {}  # why environments are not served, each cause once
        self._running: set[asyncio.Task[None]] = set()
        self._adopting = asyncio.Lock()

    async def start(self) -> None:
        """Adopt the hosts that live and start those that are missing; those of images in the background.

        Raises :class:`SandboxError` when no host describes any environment.
        """
        for host in await self._backend.list():
            if host.state is HostState.READY:
                self._adopted.setdefault(host.image, []).append(host)
        for host in self._adopted.pop("", []):
            self._keep(await self._default.take(host))
        for _ in range(self._hosts - len(self._default.links)):
            self._keep(await self._default.acquire())
        if not self.served:
            why = "; ".join(self._broken) or "none was asked for"
            raise SandboxError(f"no host serves any environment: {why}")
        self._run(self._watch(), "host watch")
        for image, hosts in self._adopted.items():
            for host in hosts:
                self._run(self._let_go(host), f"release of a host of {image}")
        self._adopted.clear()

    def _keep(self, link: HostLink) -> None:
        self._run(self._default.keep(link), f"host {link.host.id}")

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

    async def _let_go(self, host: Host) -> None:
        log.info("host %s is of image %r, which no environment names any more", host.id, host.image)
        try:
            await self._backend.release(host.id)
        except FarmError as error:
            log.warning("host %s cannot be released: %s", host.id, error)

    # What is served

    def environment(self, name: str) -> Served:
        """What is known of an environment. Raises :class:`ConfigError` that lists what there is."""
        found = self.served.get(name)
        if found is None:
            hint = did_you_mean(name, self.served)
            raise ConfigError(f"no environment {name[:200]!r} here{hint} (there is: {', '.join(sorted(self.served))})")
        return found

    def took(self, link: HostLink, state: InspectResponse) -> None:
        """See :class:`envfarm.gateway.pool.Register`."""
        host = link.host
        self.links[host.id] = link
        self._lost.pop(host.id, None)
        for cause in state.broken:
            self._broken.setdefault(cause)
            log.warning("host %s: %s", host.id, cause)
        if host.image and self.served:
            return  # hosts without an image describe; those of one say the same but for the level that they reach
        for pb in state.environments:
            known = self.served.get(pb.name)
            if known is None or known.pb != pb:
                served = self.served[pb.name] = Served(pb)
                self._have_pool(served.info.profile.image)

    def lost(self, link: HostLink) -> None:
        """See :class:`envfarm.gateway.pool.Register`."""
        self.links.pop(link.host.id, None)
        if link.busy:
            log.error("host %s is lost, with about %d episodes: %s", link.host.id, link.busy, link.cause)
        else:  # one that was replaced, or that restarted for new code, as a rule
            log.warning("host %s is gone, and no episode with it: %s", link.host.id, link.cause)
        self._note_loss(link.host.id, link.cause)

    def _have_pool(self, image: str) -> None:
        if image in self._pools:
            return
        pool = self._pools[image] = Pool(image, self._hosts, self._backend, self, partial(self._profile, image))
        hosts = self._adopted.pop(image, [])
        for host in hosts:
            self._run(self._keep_adopted(pool, host), f"host {host.id}")
        for number in range(self._hosts - len(hosts)):
            self._run(pool.keep(None), f"host {number} of image {image}")

    async def _keep_adopted(self, pool: Pool, host: Host) -> None:
        try:
            link = await pool.take(host)
        except FarmError as error:
            log.warning("host %s of an earlier gateway is not used: %s", host.id, error)
            await self._let_go(host)
            link = None
        await pool.keep(link)

    def _profile(self, image: str) -> SandboxProfile:
        profiles = (served.info.profile for served in self.served.values())
        return combined(image, (profile for profile in profiles if profile.image == image))

    # Slots

    def any(self) -> HostLink:
        """Some host, the emptiest. Raises :class:`Unavailable` when there is none at the moment."""
        links = self._default.links or self.links
        if not links:
            error = Unavailable("no host is up; one is being started")
            error.retry_after_s = 1.0
            raise error
        return max(links.values(), key=lambda link: link.free)

    async def seat(self, served: Served, episode_id: str, deadline: Deadline, *, again: bool = False) -> HostLink:
        """A host for an episode of ``served``; see :meth:`envfarm.gateway.pool.Pool.seat`.

        Raises :class:`Unavailable` at once while its environment is held back.
        """
        self.blame.check(served.info.name)
        return await self._pools[served.info.profile.image].seat(episode_id, deadline, again=again)

    def seated(self, link: HostLink, *, taken: bool) -> None:
        """Ends a reservation: the slot was ``taken``, or is free again."""
        self._pool_of(link).seated(link, taken=taken)

    def freed(self, link: HostLink) -> None:
        """A slot of ``link`` was released."""
        self._pool_of(link).freed(link)

    @staticmethod
    def turned_away(link: HostLink) -> None:
        """Ends a reservation that the host did not honour: it is full, whatever was thought; its next report tells."""
        link.acquiring -= 1
        link.busy = link.slots

    def _pool_of(self, link: HostLink) -> Pool:
        return self._pools.get(link.host.image, self._default)

    # Hosts that are not in use here

    def loss(self, host_id: str) -> str:
        """Why a host is not in use."""
        return self._lost.get(host_id, f"host {host_id} is unknown here: it ended before this gateway started")

    def may_adopt(self, host_id: str) -> bool:
        """Whether a host that is not in use here may be one that another gateway made."""
        return host_id not in self._lost

    async def adopt(self, host_id: str, address: str) -> None:
        """Use a host that a signed handle names. When it does not answer it counts as lost."""
        async with self._adopting:
            if host_id in self.links or not self.may_adopt(host_id):
                return
            try:
                link, state = await linked(Host(id=host_id, address=address, slots=0), ours=False)
            except FarmError as error:
                self._note_loss(host_id, f"it does not answer: {error}")
                return
            self.took(link, state)
            self._run(self._tend_foreign(link), f"host {host_id}")

    async def _tend_foreign(self, link: HostLink) -> None:
        try:
            await tend(link, hurried=lambda: False, reported=lambda: None)
        finally:
            self.links.pop(link.host.id, None)
            await link.__aexit__(None, None, None)
        self.lost(link)

    def _note_loss(self, host_id: str, cause: str) -> None:
        if len(self._lost) >= REMEMBERED_LOSSES:
            self._lost.pop(next(iter(self._lost)))
        self._lost[host_id] = f"host {host_id} was lost: {cause}"

    # What people see

    def status(self) -> FarmStatus:
        """Everything as it is now."""
        by_image: dict[str, list[str]] = {}
        for name, served in sorted(self.served.items()):
            by_image.setdefault(served.info.profile.image, []).append(name)
        foreign = [link for link in self.links.values() if not link.ours]
        return FarmStatus(
            pools=tuple(
                pool.status(by_image.get(image, ()), () if image else foreign)
                for image, pool in sorted(self._pools.items())
            ),
            suspended=tuple(self.blame.suspended()),
            lost=tuple(LostHost(id=host, cause=cause) for host, cause in [*self._lost.items()][-SHOWN_LOSSES:]),
            broken=tuple(self._broken),
        )


@contextlib.asynccontextmanager
async def host_pools(backend: Backend, *, hosts: int) -> AsyncIterator[HostPools]:
    """Running pools of ``hosts`` hosts each. The backend stays the caller's to close."""
    async with asyncio.TaskGroup() as tasks:
        pools = HostPools(backend, tasks, hosts)
        try:
            await pools.start()
            yield pools
        finally:
            pools.stop()
