"""The attached backend: hosts that compose, systemd or a person starts and starts again, found by their sockets.

It never starts a process. A host is taken when it answers and serves what is asked; it is let go of by draining it, so
that it ends and whoever supervises it starts a fresh one with a new id.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import grpc.aio
import msgspec

from envfarm.core.errors import SandboxError
from envfarm.core.sandbox import Host, HostState, Isolation, SandboxProfile
from envfarm.wire.channel import connect
from envfarm.wire.convert.enums import ISOLATION_FROM_PB
from envfarm.wire.v1 import host_pb2, host_pb2_grpc
from sandboxes.attached.folder import AttachedFolder, listens
from sandboxes.hosting.changes import Changes
from sandboxes.hosting.contact import answers, inspected

log = logging.getLogger(__name__)
WAIT_SECONDS = 60.0
GRACE_SECONDS = 1.0  # for episodes that still run in a host that is let go of: nobody waits for them any more
END_SECONDS = 30.0
_DRAIN_SECONDS = 5.0
_POLL_SECONDS = 0.1


class _Entry:
    """A host that this backend has taken."""

    def __init__(self, host: Host, profile: SandboxProfile) -> None:
        self.host = host
        self.profile = profile
        self.watcher: asyncio.Task[None] | None = None

    @property
    def socket(self) -> Path:
        return Path(self.host.address.removeprefix("unix:"))


class AttachedBackend:
    """Takes up to ``max_hosts`` hosts that listen in ``folder`` and serve exactly ``environments``.

    ``folder``: default ``STATE/attached-hosts``; only the user that hosts and gateway share may enter it. ``wait``:
    seconds until :meth:`acquire` gives up. How many slots a host has is said where it is started, so ``slots`` is not
    used.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        environments: Sequence[str],
        slots: int = 0,  # noqa: ARG002 - every backend is made with it
        max_hosts: int = 1,
        folder: Path | str | None = None,
        wait: float | str = WAIT_SECONDS,
    ) -> None:
        self._folder = AttachedFolder(Path(folder or state_dir / "attached-hosts").absolute(), state_dir)
        self._environments = frozenset(environments)
        self._max_hosts = max_hosts
        self._wait = float(wait)
        self._entries: dict[str, _Entry] = {}
        self._acquiring = 0
        self._refused: dict[str, str] = {}  # id of a host → why it is not taken
        self._changes = Changes()
        self._adopted = False
        self._lock = asyncio.Lock()

    async def acquire(self, profile: SandboxProfile) -> Host:
        """A host that nobody has yet. Raises :class:`SandboxError` when none appears in time."""
        await self._adopt()
        if len(self._entries) + self._acquiring >= self._max_hosts:
            raise SandboxError(f"the attached backend has its {self._max_hosts} hosts already; raise max_hosts")
        return await self._next(profile)

    async def release(self, host_id: str) -> None:
        """Drain a host and wait for its end. Raises :class:`SandboxError` when it stays."""
        await self._adopt()
        entry = self._entries.get(host_id)
        if entry is not None:
            await self._end(entry, "released")

    async def recycle(self, host_id: str, cause: str) -> Host:
        """Let go of a host, which is gone when this returns, and take the next free one for the same profile."""
        entry = self._entries.get(host_id)
        await self.release(host_id)
        log.info("host %s is replaced: %s", host_id, cause)
        return await self._next(entry.profile if entry is not None else SandboxProfile())

    async def list(self) -> Sequence[Host]:
        """Hosts that this gateway has, those that it had before a restart included."""
        await self._adopt()
        return [entry.host for entry in self._entries.values()]

    def watch(self) -> AsyncIterator[Host]:
        """Every change of a host's state, from now on."""
        return self._changes.watch()

    async def close(self, *, keep_hosts: bool = False) -> None:
        """Drain every host, or (``keep_hosts``) stop watching them and keep the claims on them."""
        await self._adopt()
        entries = [*self._entries.values()]
        if not keep_hosts:
            await asyncio.gather(*(self._end(entry, "the backend was closed") for entry in entries))
            return
        for entry in entries:
            self._entries.pop(entry.host.id, None)
            await self._stop_watching(entry)

    # Finding

    async def _next(self, profile: SandboxProfile) -> Host:
        self._acquiring += 1
        try:
            async with asyncio.timeout(self._wait):
                if (host := await self._take_one(profile)) is not None:
                    return host
                log.info("waiting up to %g s for a host in %s", self._wait, self._folder.path)
                while True:
                    await asyncio.sleep(_POLL_SECONDS)
                    if (host := await self._take_one(profile)) is not None:
                        return host
        except TimeoutError:
            raise SandboxError(self._nothing_found(profile)) from None
        finally:
            self._acquiring -= 1

    def _nothing_found(self, profile: SandboxProfile) -> str:
        names = " ".join(f"--environment {name}" for name in sorted(self._environments))
        names += f" --image {profile.image} --root FOLDER" if profile.image else ""
        causes = [f"; host {host_id} is not taken: {cause}" for host_id, cause in [*self._refused.items()][-3:]]
        return (
            f"no free host answers in {self._folder.path} within {self._wait:g} s{''.join(causes)}; "
            f"start one there: envfarm host --listen 'unix:{self._folder.path}/{{id}}.sock' {names}"
        )

    async def _take_one(self, profile: SandboxProfile) -> Host | None:
        """The first free host that fits."""
        async with self._lock:
            taken = {entry.socket for entry in self._entries.values()}
            for file in await asyncio.to_thread(self._folder.sockets):
                if file in taken:
                    continue
                state = await inspected(f"unix:{file}")
                if state is None or state.host_id in self._entries:
                    continue
                cause = self._misfit(state, profile)
                if cause:
                    self._refuse(state.host_id, cause)
                elif await asyncio.to_thread(self._folder.claim, state.host_id):
                    return self._take(state, file, profile)
        return None

    def _misfit(self, state: host_pb2.InspectResponse, profile: SandboxProfile) -> str:
        """Why a host cannot be used; empty when it can."""
        served = {info.name for info in state.environments}
        broken = {name for name in self._environments if any(text.startswith(f"{name}: ") for text in state.broken)}
        if served | broken != self._environments:
            return f"it serves {_listed(served)}, and {_listed(self._environments)} is asked for"
        if state.image != profile.image:
            return f"its commands see {_seen(state.image)}, and {_seen(profile.image)} is asked for"
        level = _level(state)
        if profile.isolation not in (Isolation.NONE, Isolation.BWRAP) and not level.includes(profile.isolation):
            return f"it isolates with {level.value}, and {profile.isolation.value} is asked for"
        return ""

    def _refuse(self, host_id: str, cause: str) -> None:
        if self._refused.get(host_id) != cause:
            self._refused[host_id] = cause
            log.warning("host %s in %s is not taken: %s", host_id, self._folder.path, cause)
            while len(self._refused) > 100:
                self._refused.pop(next(iter(self._refused)))

    # Adoption

    async def _adopt(self) -> None:
        """Once: have those hosts again that this gateway had before it was restarted."""
        async with self._lock:
            if self._adopted:
                return
            await asyncio.to_thread(self._folder.prepare)
            missing = set(await asyncio.to_thread(self._folder.claimed))
            for file in await asyncio.to_thread(self._folder.sockets) if missing else ():
                state = await inspected(f"unix:{file}")
                if state is not None and state.host_id in missing:
                    missing.discard(state.host_id)
                    await self._adopt_one(state, file)
            for host_id in missing:
                await asyncio.to_thread(self._folder.forget, host_id)
            self._adopted = True

    async def _adopt_one(self, state: host_pb2.InspectResponse, file: Path) -> None:
        profile = SandboxProfile(image=state.image)
        host = self._take(state, file, profile)
        cause = self._misfit(state, profile)
        if cause or len(self._entries) > self._max_hosts:
            await self._end(self._entries[host.id], f"left by an earlier gateway: {cause or 'there are enough'}")
        else:
            log.info("host %s was adopted", host.id)

    # Bookkeeping

    def _take(self, state: host_pb2.InspectResponse, file: Path, profile: SandboxProfile) -> Host:
        host = Host(
            id=state.host_id,
            address=f"unix:{file}",
            slots=state.slots,
            isolation=_level(state),
            image=state.image,
        )
        entry = self._entries[host.id] = _Entry(host, profile)
        entry.watcher = asyncio.create_task(self._watch_end(entry), name=f"watch {host.id}")
        self._changes.tell(host)
        return host

    async def _watch_end(self, entry: _Entry) -> None:
        """Follow the connection to a host; when that ends, see whether the host did."""
        channel = connect(entry.host.address)
        try:
            state = channel.get_state(try_to_connect=True)
            while True:
                await channel.wait_for_state_change(state)
                before, state = state, channel.get_state(try_to_connect=True)
                lost = before is grpc.ChannelConnectivity.READY or state is grpc.ChannelConnectivity.TRANSIENT_FAILURE
                if lost and not await answers(entry.host.address, entry.host.id):
                    break
        finally:
            await channel.close()
        entry.watcher = None
        await self._gone(entry, "it ended, or was ended by whoever started it")

    async def _end(self, entry: _Entry, cause: str) -> None:
        await self._stop_watching(entry)
        if self._entries.get(entry.host.id) is not entry:
            return
        self._change(entry, HostState.DRAINING, cause)
        try:
            async with asyncio.timeout(END_SECONDS):
                await _drained(entry)
        except TimeoutError:
            cause = f"it does not end within {END_SECONDS:g} s; end it where it was started"
            self._entries.pop(entry.host.id, None)  # its claim stays, so that nobody takes it
            self._change(entry, HostState.QUARANTINED, cause)
            raise SandboxError(f"host {entry.host.id} is of no use, and {cause}") from None
        await self._gone(entry, cause)

    async def _gone(self, entry: _Entry, cause: str) -> None:
        if self._entries.pop(entry.host.id, None) is not None:
            await asyncio.to_thread(self._folder.forget, entry.host.id)
            self._change(entry, HostState.GONE, cause)

    async def _stop_watching(self, entry: _Entry) -> None:
        if entry.watcher is not None:
            entry.watcher.cancel()
            await asyncio.wait([entry.watcher])
            entry.watcher = None

    def _change(self, entry: _Entry, state: HostState, cause: str) -> None:
        entry.host = msgspec.structs.replace(entry.host, state=state, cause=cause)
        self._changes.tell(entry.host)


async def _drained(entry: _Entry) -> None:
    """Have a host end, and return once it has."""
    channel = connect(entry.host.address)
    try:
        with contextlib.suppress(grpc.aio.AioRpcError):  # whether it ended is seen below
            stub = host_pb2_grpc.HostServiceStub(channel)
            await stub.Drain(host_pb2.DrainRequest(grace_s=GRACE_SECONDS), timeout=_DRAIN_SECONDS)
    finally:
        await channel.close()
    while await asyncio.to_thread(listens, entry.socket):
        state = await inspected(entry.host.address)
        if state is not None and state.host_id != entry.host.id:
            return  # the next one took its place already
        await asyncio.sleep(_POLL_SECONDS / 5)


def _level(state: host_pb2.InspectResponse) -> Isolation:
    """What commands in a host are confined by, as its environments say; those that run none may say nothing."""
    levels = [ISOLATION_FROM_PB.get(info.isolation, Isolation.NONE) for info in state.environments]
    return next((level for level in levels if level is not Isolation.NONE), Isolation.NONE)


def _seen(image: str) -> str:
    return f"image {image!r}" if image else "the host's own system"


def _listed(names: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
