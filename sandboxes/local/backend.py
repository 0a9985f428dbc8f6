"""The local backend: each host is a process of this machine behind a unix socket that only its owner can reach.

Hosts do not die with the gateway: a new one adopts them, and one that no gateway contacts ends itself.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import psutil

from envfarm.core.errors import IsolationError, SandboxError
from envfarm.core.ids import new_id
from envfarm.core.sandbox import Host, HostState, Isolation, SandboxProfile
from sandboxes.hosting import sockets
from sandboxes.hosting.changes import Changes
from sandboxes.hosting.contact import announced, answers
from sandboxes.isolation import cgroups, mounts
from sandboxes.isolation.bwrap import require_bwrap
from sandboxes.isolation.gvisor import require_runsc
from sandboxes.local.process import HostProcess, last_lines
from sandboxes.local.record import HostFolder, HostRecord

log = logging.getLogger(__name__)
LEASE_SECONDS = 60.0
READY_SECONDS = 60.0


class _Entry:
    """A host that this backend looks after."""

    def __init__(self, record: HostRecord, process: HostProcess, host: Host) -> None:
        self.record = record
        self.process = process
        self.host = host
        self.watcher: asyncio.Task[None] | None = None


class LocalBackend:
    """Makes up to ``max_hosts`` host processes with ``slots`` slots each, all serving ``environments``.

    ``lease``: seconds without any gateway after which a host ends itself.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        environments: Sequence[str],
        slots: int,
        max_hosts: int = 1,
        lease: float = LEASE_SECONDS,
        reload: bool = False,
    ) -> None:
        self._folder = HostFolder(state_dir)
        self._environments = tuple(environments)
        self._slots = slots
        self._max_hosts = max_hosts
        self._lease = lease
        self._reload = reload
        self._entries: dict[str, _Entry] = {}
        self._starting = 0
        self._changes = Changes()
        self._adopted = False
        self._isolation = Isolation.NONE  # found out with the adoption
        self._lock = asyncio.Lock()

    async def acquire(self, profile: SandboxProfile) -> Host:
        """A new host process. Raises :class:`SandboxError` with the cause when none can be had."""
        if profile.isolation not in (Isolation.NONE, Isolation.BWRAP, Isolation.GVISOR):
            raise IsolationError(
                f"the local backend isolates with bwrap or gvisor, not {profile.isolation.value}; "
                "use another backend or set the profile's isolation to bwrap"
            )
        if profile.isolation is Isolation.GVISOR:
            await asyncio.to_thread(require_runsc)
        if profile.image:
            raise SandboxError(
                f"the local backend runs commands in this machine's own system and has no image {profile.image!r}: "
                "use --backend docker, or start hosts with --image and --root yourself and use --backend attached"
            )
        await self._adopt()
        if len(self._entries) + self._starting >= self._max_hosts:
            raise SandboxError(f"the local backend has its {self._max_hosts} hosts already; raise max_hosts")
        return await self._start()

    async def release(self, host_id: str) -> None:
        """End a host and all that it owns."""
        await self._adopt()
        entry = self._entries.get(host_id)
        if entry is not None:
            await self._end(entry, "released")

    async def recycle(self, host_id: str, cause: str) -> Host:
        """Replace a host; the old one is gone when this returns."""
        await self.release(host_id)
        log.info("host %s is replaced: %s", host_id, cause)
        return await self._start()

    async def list(self) -> Sequence[Host]:
        """Hosts that run, those adopted from an earlier process included."""
        await self._adopt()
        return [entry.host for entry in self._entries.values()]

    def watch(self) -> AsyncIterator[Host]:
        """Every change of a host's state, from now on."""
        return self._changes.watch()

    async def close(self, *, keep_hosts: bool = False) -> None:
        """End every host, or (``keep_hosts``) stop watching them. Raises when a process stays."""
        await self._adopt()
        entries = [*self._entries.values()]
        if not keep_hosts:
            await asyncio.gather(*(self._end(entry, "the backend was closed") for entry in entries))
            return
        for entry in entries:
            self._entries.pop(entry.record.id, None)
            await self._stop_watching(entry)
            entry.process.forget()

    # Starting

    async def _start(self) -> Host:
        self._starting += 1
        try:
            host_id = new_id("host")
            record, process = await asyncio.to_thread(self._spawn, host_id)
            entry = self._take(record, HostProcess(process.pid, process), HostState.STARTING)
            try:
                await self._until_ready(entry)
            except BaseException as error:
                await asyncio.shield(self._end(entry, f"it did not start: {error}"))
                raise
        finally:
            self._starting -= 1
        return self._change(entry, HostState.READY, "")

    def _spawn(self, host_id: str) -> tuple[HostRecord, subprocess.Popen[bytes]]:
        """Start a host and write it down. Raises :class:`SandboxError`; then nothing runs."""
        self._folder.prepare()
        try:
            socket, folder = self._folder.socket(host_id)
            process = self._popen(host_id, socket)
            try:
                record = HostRecord(
                    id=host_id,
                    pid=process.pid,
                    started=psutil.Process(process.pid).create_time(),
                    address=f"unix:{socket}",
                    environments=self._environments,
                    slots=self._slots,
                    folder=folder,
                )
                self._folder.write(record)
            except BaseException:
                process.kill()
                process.wait()
                raise
        except (OSError, psutil.Error) as error:
            raise SandboxError(f"host {host_id} cannot be started: {error}") from error
        return record, process

    def _popen(self, host_id: str, socket: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "sandboxes.host", "--id", host_id, "--listen", f"unix:{socket}"]
        argv += ["--slots", str(self._slots), "--lease", str(self._lease)]
        argv += ["--address-file", str(self._folder.address_file(host_id))]
        if self._reload:
            argv.append("--reload")
        for name in self._environments:
            argv += ["--environment", name]
        with self._folder.log(host_id).open("ab") as sink:
            return subprocess.Popen(  # noqa: S603 - our own command
                argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
            )

    async def _until_ready(self, entry: _Entry) -> None:
        file = self._folder.address_file(entry.record.id)
        log_file = self._folder.log(entry.record.id)
        try:
            if not await announced(file, entry.process.ended, READY_SECONDS):
                tail = await asyncio.to_thread(last_lines, log_file)
                raise SandboxError(
                    f"host {entry.record.id} did not start: {entry.process.status}; {log_file} ends:\n  {tail}"
                )
        except TimeoutError:
            raise SandboxError(
                f"host {entry.record.id} does not serve after {READY_SECONDS:g} s; see {log_file}"
            ) from None

    # Adoption

    async def _adopt(self) -> None:
        """Once: take over what an earlier gateway left, end what cannot be used, forget what is dead."""
        async with self._lock:
            if self._adopted:
                return
            await asyncio.to_thread(self._folder.prepare)
            await asyncio.to_thread(sockets.sweep)
            self._isolation = await asyncio.to_thread(_isolation)
            for record in await asyncio.to_thread(self._folder.records):
                await self._adopt_one(record)
            self._adopted = True

    async def _adopt_one(self, record: HostRecord) -> None:
        if not record.alive():
            await asyncio.to_thread(self._folder.forget, record)
            return
        entry = self._take(record, HostProcess(record.pid), HostState.READY)
        fits = record.environments == self._environments and record.slots == self._slots
        if not fits or len(self._entries) > self._max_hosts or not await answers(record.address, record.id):
            await self._end(entry, "left by an earlier gateway and of no use to this one")
            return
        log.info("host %s (process %d) was adopted", record.id, record.pid)

    # Bookkeeping

    def _take(self, record: HostRecord, process: HostProcess, state: HostState) -> _Entry:
        host = Host(id=record.id, address=record.address, slots=record.slots, state=state, isolation=self._isolation)
        entry = self._entries[record.id] = _Entry(record, process, host)
        entry.watcher = asyncio.create_task(self._watch_end(entry), name=f"watch {record.id}")
        self._changes.tell(host)
        return entry

    async def _watch_end(self, entry: _Entry) -> None:
        await entry.process.ended.wait()
        tail = await asyncio.to_thread(last_lines, self._folder.log(entry.record.id), 2)
        await self._gone(entry, f"{entry.process.status}: {tail}")

    async def _gone(self, entry: _Entry, cause: str) -> None:
        if self._entries.pop(entry.record.id, None) is not None:
            await asyncio.to_thread(self._folder.forget, entry.record)
            await asyncio.to_thread(_sweep)
            self._change(entry, HostState.GONE, cause)

    async def _end(self, entry: _Entry, cause: str) -> None:
        await self._stop_watching(entry)
        if entry.record.id in self._entries:
            self._change(entry, HostState.DRAINING, cause)
            await entry.process.end()
            await self._gone(entry, cause)

    async def _stop_watching(self, entry: _Entry) -> None:
        if entry.watcher is not None:
            entry.watcher.cancel()
            await asyncio.wait([entry.watcher])
            entry.watcher = None

    def _change(self, entry: _Entry, state: HostState, cause: str) -> Host:
        entry.host = msgspec.structs.replace(entry.host, state=state, cause=cause)
        self._changes.tell(entry.host)
        return entry.host


def _sweep() -> None:
    """What a killed host could not remove itself."""
    mounts.sweep()
    cgroups.sweep()
    sockets.sweep()


def _isolation() -> Isolation:
    try:
        require_bwrap()
    except IsolationError:
        return Isolation.NONE
    return Isolation.BWRAP
