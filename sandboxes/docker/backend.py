"""The Docker backend: each host is a container of the farm's host image, reached through a socket in a shared folder.

No port is open and no container has a network. What is known of a host stands in the labels of its container, so that
the next gateway adopts it; one that no gateway contacts ends itself, and its container is removed with it, or (see
:attr:`EngineFacts.removes`) by the next gateway. With ``live-restore`` hosts go on while the engine is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
from docker import APIClient

from envfarm.core.errors import FarmError, IsolationError, SandboxError
from envfarm.core.ids import new_id
from envfarm.core.sandbox import Host, HostState, Isolation, SandboxProfile
from envfarm.wire.convert.enums import ISOLATION_FROM_PB
from sandboxes.docker import volumes
from sandboxes.docker.container import ADDRESS, SOCKET, HostSpec, config, name
from sandboxes.docker.engine import CALL_SECONDS, Engine, EngineFacts, local_url
from sandboxes.docker.errors import SOCKETS_OF_GVISOR, DockerError
from sandboxes.docker.folders import HostFolders
from sandboxes.docker.images import Images, Pull
from sandboxes.docker.labels import HostRecord, farm_version
from sandboxes.docker.sources import sources
from sandboxes.docker.sweeping import Found, discard, sweep
from sandboxes.docker.volumes import ImageVolumes
from sandboxes.docker.watch import Deaths, HostContainer
from sandboxes.hosting.changes import Changes
from sandboxes.hosting.contact import announced, answers, inspected

log = logging.getLogger(__name__)
LEASE_SECONDS = 60.0
READY_SECONDS = 60.0
HOST_IMAGE = "envfarm-host"
LEVEL = Isolation.CONTAINER  # whatever kernel the runtime gives it
HOST_USER = 65_532  # owns nothing; where the gateway is not root the host is who the gateway is, to share a socket


class _Entry:
    """A host that this backend looks after."""

    def __init__(self, record: HostRecord, container: HostContainer, host: Host) -> None:
        self.record = record
        self.container = container
        self.host = host
        self.watcher: asyncio.Task[None] | None = None


class DockerBackend:
    """Makes up to ``max_hosts`` containers with ``slots`` slots each, all serving ``environments``.

    ``lease``: seconds without any gateway after which a host ends itself. ``host_image``: what hosts are made of
    (``sandboxes/images``). ``runtime``: of the engine; empty: its default. gVisor's needs the arguments
    ``--network=none --host-uds=all`` and a release in which bubblewrap works, else it is refused. ``pull``: one of
    ``missing``, ``never``, ``always``. ``mounts``: ``/here:/there`` folders for hosts to read; the folder of
    an environment named ``file.py:Class`` is mounted anyway. ``reload``: hosts end when that code changes, to be made
    anew with it. ``engine``: URL of its socket; default ``DOCKER_HOST``, else the usual one.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        environments: Sequence[str],
        slots: int,
        max_hosts: int = 1,
        lease: float = LEASE_SECONDS,
        host_image: str = HOST_IMAGE,
        runtime: str = "",
        pull: Pull | str = Pull.MISSING,
        mounts: Sequence[str] | str = (),
        engine: str = "",
        reload: bool = False,
    ) -> None:
        self._folders = HostFolders(state_dir)
        self._environments = tuple(environments)
        self._slots = slots
        self._max_hosts = max_hosts
        self._lease = float(lease)
        self._host_image = host_image
        self._runtime = runtime
        self._mounts = tuple(mounts.split(",") if isinstance(mounts, str) and mounts else mounts)
        self._reload = reload
        self._user = HOST_USER if os.geteuid() == 0 else os.geteuid()
        self._engine = Engine(engine)
        self._images = Images(self._engine, _pull(pull))
        self._changes = Changes()
        self._entries: dict[str, _Entry] = {}
        self._starting = 0
        self._leftovers: set[str] = set()  # hosts of which a container may be left that was never started
        self._lock = asyncio.Lock()
        self._closed = False
        self._gateway = new_id("gateway")
        self._owner = ""  # known from the adoption on, as are the next two
        self._deaths: Deaths | None = None
        self._volumes: ImageVolumes | None = None

    async def acquire(self, profile: SandboxProfile) -> Host:
        """A new host in a container. Raises :class:`SandboxError` with the cause when none can be had."""
        if not LEVEL.includes(profile.isolation):
            raise IsolationError(
                f"the docker backend isolates with {LEVEL.value}, not {profile.isolation.value}; "
                "use another backend or set the profile's isolation to container or bwrap"
            )
        await self._adopt()
        await self._end_leftovers()
        if len(self._entries) + self._starting >= self._max_hosts:
            raise SandboxError(f"the docker backend has its {self._max_hosts} hosts already; raise max_hosts")
        return await self._start(profile)

    async def release(self, host_id: str) -> None:
        """End a host and all that it owns."""
        await self._adopt()
        entry = self._entries.get(host_id)
        if entry is not None:
            await self._end(entry, "released")

    async def recycle(self, host_id: str, cause: str) -> Host:
        """Replace a host by one for the same profile; the old one is gone when this returns."""
        entry = self._entries.get(host_id)
        await self.release(host_id)
        await self._end_leftovers()
        log.info("host %s is replaced: %s", host_id, cause)
        return await self._start(entry.record.profile if entry is not None else SandboxProfile())

    async def list(self) -> Sequence[Host]:
        """Hosts that run, those adopted from an earlier process included."""
        if not self._closed:
            await self._adopt()
        return [entry.host for entry in self._entries.values()]

    def watch(self) -> AsyncIterator[Host]:
        """Every change of a host's state, from now on."""
        return self._changes.watch()

    async def close(self, *, keep_hosts: bool = False) -> None:
        """End every host, or (``keep_hosts``) stop watching them. Raises when a container stays."""
        if self._closed:
            return
        try:
            if not keep_hosts:
                with contextlib.suppress(SandboxError):  # no engine: nothing can be ended, as was said before
                    await self._adopt()
            await asyncio.gather(*(self._let_go(entry, keep_hosts) for entry in [*self._entries.values()]))
        finally:
            self._closed = True
            if self._deaths is not None:
                self._deaths.close()
            self._engine.close()
            self._folders.close()

    # Starting

    async def _start(self, profile: SandboxProfile) -> Host:
        self._starting += 1
        try:
            host_id = new_id("host")
            try:
                entry = await self._launch(host_id, profile)
            except BaseException:
                await asyncio.shield(self._discard(host_id))
                raise
            try:
                await self._until_ready(entry)
            except BaseException as error:
                await asyncio.shield(self._end(entry, f"it did not start: {error}"))
                raise
        finally:
            self._starting -= 1
        return self._change(entry, HostState.READY, "")

    async def _launch(self, host_id: str, profile: SandboxProfile) -> _Entry:
        """A container that runs. When this raises, :meth:`_discard` removes what there is of it."""
        facts = await self._engine.facts()
        if self._runtime and self._runtime not in facts.runtimes:
            raise IsolationError(
                f"the Docker Engine at {self._engine.url} has no runtime {self._runtime!r} (it has: "
                f"{', '.join(sorted(facts.runtimes))}); install it and name it under 'runtimes' in "
                "/etc/docker/daemon.json, or leave the option runtime out"
            )
        spec = await self._spec(host_id, profile)
        container = await self._engine.call(f"creating host {host_id}", lambda client: _create(client, spec, facts))
        if spec.volume and not await self._engine.call(
            f"looking at the files of host {host_id}", lambda client: volumes.complete(client, container)
        ):
            raise DockerError(f"volume {spec.volume} with the files of {profile.image!r} was removed meanwhile")
        await self._engine.call(f"starting host {host_id}", lambda client: client.start(container), 2 * CALL_SECONDS)
        return self._take(container, spec.record, HostState.STARTING)

    async def _spec(self, host_id: str, profile: SandboxProfile) -> HostSpec:
        code = await asyncio.to_thread(sources, self._environments, self._mounts, self._user, Path.cwd())
        image = await self._images.get(self._host_image)
        volume = ""
        if profile.image and self._volumes is not None:
            volume = await self._volumes.get(await self._images.get(profile.image))
        folder = await asyncio.to_thread(self._folders.make, host_id, self._user)
        record = HostRecord(
            id=host_id,
            owner=self._owner,
            state=str(self._folders.path),
            gateway=self._gateway,
            folder=str(folder),
            environments=self._environments,
            slots=self._slots,
            lease=self._lease,
            profile=profile,
            inside=LEVEL,
        )
        return HostSpec(
            record=record,
            image=image.id,
            user=self._user,
            volume=volume,
            root=volumes.root() if volume else "",
            runtime=self._runtime,
            mounts=self._mounts,
            sources=code,
            reload=self._reload,
        )

    async def _discard(self, host_id: str) -> None:
        """Remove what was made of a host that could not be started."""
        self._leftovers.add(host_id)
        with contextlib.suppress(FarmError):  # the reason why it could not be started is the one to be told
            await self._remove_leftover(host_id)
        await asyncio.to_thread(self._folders.remove, host_id)

    async def _until_ready(self, entry: _Entry) -> None:
        host_id, container = entry.record.id, entry.container
        try:
            if not await announced(Path(entry.record.folder, ADDRESS), container.ended, READY_SECONDS):
                raise SandboxError(
                    f"host {host_id} did not start: {container.death}; its log ends:\n  {container.last_lines()}"
                )
        except TimeoutError:
            raise SandboxError(
                f"host {host_id} does not serve after {READY_SECONDS:g} s; the log of its container ends:\n  "
                f"{container.last_lines()}"
            ) from None
        if not await self._answers(entry):
            hint = f"; {SOCKETS_OF_GVISOR}" if self._runtime else ""
            raise SandboxError(f"host {host_id} was started and does not answer at {entry.host.address}{hint}")
        if (
            self._runtime
            and entry.host.isolation is Isolation.NONE
            and entry.record.profile.isolation is not Isolation.NONE
        ):
            raise IsolationError(
                f"bubblewrap does not work under the runtime {self._runtime!r}, so that commands in its hosts could "
                "not be confined: leave the option runtime out, or have commands run under gVisor themselves "
                "(--backend local, and isolation gvisor in the profile)"
            )

    async def _answers(self, entry: _Entry) -> bool:
        """Whether the host serves; notes the level that its commands reach."""
        state = await inspected(entry.host.address)
        if state is None or state.host_id != entry.record.id:
            return False
        reached = {ISOLATION_FROM_PB[info.isolation] for info in state.environments}
        level = entry.record.inside
        entry.host = msgspec.structs.replace(entry.host, isolation=level if level in reached else Isolation.NONE)
        return True

    # Adoption

    async def _adopt(self) -> None:
        """Once: take over what an earlier gateway left, end what cannot be used, remove what is over."""
        async with self._lock:
            if self._deaths is not None:
                return
            local_url(self._engine.url)
            self._owner = await asyncio.to_thread(self._folders.prepare)
            await self._engine.facts()  # whether anybody is there at all
            deaths = Deaths(self._engine, self._owner)
            try:
                self._volumes = ImageVolumes(self._engine, self._owner, self._folders.path, self._user)
                self._deaths = deaths
                own, orphans = await self._engine.call(
                    "clearing up", lambda client: sweep(client, self._owner), 2 * CALL_SECONDS
                )
                for container, record in own:
                    await self._adopt_one(container, record)
                await asyncio.to_thread(self._forget_folders, {record.id for _, record in own})
                for orphan in orphans:
                    await self._reap(orphan)
            except BaseException:
                self._deaths = None
                deaths.close()
                raise

    async def _adopt_one(self, container: str, record: HostRecord) -> None:
        entry = self._take(container, record, HostState.READY)
        fits = (record.environments, record.slots) == (self._environments, self._slots)
        fits = fits and record.version == farm_version() and len(self._entries) <= self._max_hosts
        if not fits or not await self._answers(entry):
            await self._end(entry, "left by an earlier gateway and of no use to this one")
            return
        log.info("host %s (container %s) was adopted", record.id, container[:12])

    async def _reap(self, orphan: Found) -> None:
        """Remove another gateway's host that hangs, so that it cannot end itself; that gateway is gone."""
        container, record = orphan
        if not await answers(f"unix:{record.folder}/{SOCKET}", record.id):
            log.warning("host %s hangs and its gateway is gone: it is removed", record.id)
            await self._engine.call(f"removing host {record.id}", lambda client: discard(client, container))

    def _forget_folders(self, running: set[str]) -> None:
        for host_id in self._folders.all():
            if host_id not in running:
                self._folders.remove(host_id)

    # Bookkeeping

    def _take(self, container: str, record: HostRecord, state: HostState) -> _Entry:
        if self._deaths is None:
            raise SandboxError("this backend is closed")
        host = Host(
            id=record.id,
            address=f"unix:{record.folder}/{SOCKET}",
            slots=record.slots,
            state=state,
            image=record.profile.image,
        )
        watched = HostContainer(self._engine, self._deaths, container)
        entry = self._entries[record.id] = _Entry(record, watched, host)
        entry.watcher = asyncio.create_task(self._watch_end(entry), name=f"watch {record.id}")
        self._changes.tell(host)
        return entry

    async def _watch_end(self, entry: _Entry) -> None:
        await entry.container.ended.wait()
        ended = entry.container.container
        try:
            await self._engine.call(f"removing host {entry.record.id}", lambda client: discard(client, ended))
        except SandboxError:  # the engine went away again
            self._leftovers.add(entry.record.id)
        await self._gone(entry, f"{entry.container.death}: {entry.container.last_lines(2)}")

    async def _gone(self, entry: _Entry, cause: str) -> None:
        if self._entries.pop(entry.record.id, None) is not None:
            await asyncio.to_thread(self._folders.remove, entry.record.id)
            self._change(entry, HostState.GONE, cause)

    async def _end(self, entry: _Entry, cause: str) -> None:
        await _stop_watching(entry)
        if entry.record.id in self._entries:
            self._change(entry, HostState.DRAINING, cause)
            try:
                await entry.container.end()
            except BaseException:
                entry.watcher = asyncio.create_task(self._watch_end(entry), name=f"watch {entry.record.id}")
                raise
            await self._gone(entry, cause)

    async def _end_leftovers(self) -> None:
        """End what could not be ended before, when the engine was away. Raises the farm's errors when it still is."""
        for entry in [*self._entries.values()]:
            if entry.host.state is HostState.DRAINING and entry.watcher is not None:
                await self._end(entry, entry.host.cause)
        for host_id in [*self._leftovers]:
            await self._remove_leftover(host_id)

    async def _remove_leftover(self, host_id: str) -> None:
        await self._engine.call(f"removing host {host_id}", lambda client: discard(client, name(host_id)))
        self._leftovers.discard(host_id)

    async def _let_go(self, entry: _Entry, keep: bool) -> None:
        if not keep:
            await self._end(entry, "the backend was closed")
            return
        self._entries.pop(entry.record.id, None)
        await _stop_watching(entry)
        entry.container.forget()

    def _change(self, entry: _Entry, state: HostState, cause: str) -> Host:
        entry.host = msgspec.structs.replace(entry.host, state=state, cause=cause)
        self._changes.tell(entry.host)
        return entry.host


async def _stop_watching(entry: _Entry) -> None:
    if entry.watcher is not None:
        entry.watcher.cancel()
        await asyncio.wait([entry.watcher])
        entry.watcher = None


def _create(client: APIClient, spec: HostSpec, facts: EngineFacts) -> str:
    return str(client.create_container_from_config(config(spec, facts), name(spec.record.id))["Id"])


def _pull(value: Pull | str) -> Pull:
    try:
        return Pull(value)
    except ValueError:
        raise SandboxError(f"pull is {value!r}, expected one of: {', '.join(Pull)}") from None
