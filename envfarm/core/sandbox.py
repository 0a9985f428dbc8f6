"""Where an episode runs: the profile it asks for, the host that serves it, and the backend that makes hosts."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from typing import Any, Protocol

import msgspec


class Isolation(enum.StrEnum):
    """What stands between code that a model wrote and the machine.

    ``none``: nothing; trusted tools only. ``bwrap``: namespaces, a system call filter, no privileges. ``gvisor``: a
    kernel of its own in user space. ``container``, ``pod``: the host itself is in one, and each command is confined
    again in there, so that it reaches neither its neighbours nor the host's own code.
    """

    NONE = "none"
    BWRAP = "bwrap"
    GVISOR = "gvisor"
    CONTAINER = "container"
    POD = "pod"

    def includes(self, other: Isolation) -> bool:
        """Whether what is confined at this level is confined at ``other`` as well."""
        return other in _INCLUDED[self]


_INCLUDED = {
    Isolation.NONE: {Isolation.NONE},
    Isolation.BWRAP: {Isolation.NONE, Isolation.BWRAP},
    Isolation.GVISOR: {Isolation.NONE, Isolation.GVISOR},
    Isolation.CONTAINER: {Isolation.NONE, Isolation.BWRAP, Isolation.CONTAINER},
    Isolation.POD: {Isolation.NONE, Isolation.BWRAP, Isolation.CONTAINER, Isolation.POD},
}


class SandboxProfile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Resources and isolation of one slot. ``isolation`` concerns :meth:`Sandbox.exec`; environment code is trusted.

    ``image``: container image whose files commands see as their root; empty: the system of the host. ``isolation`` is
    the least level; what a host reaches may include more. Memory and disk are in bytes, ``cpus`` in cores,
    ``exec_seconds`` in seconds of wall time per call.
    """

    image: str = ""
    isolation: Isolation = Isolation.BWRAP
    cpus: float = 1.0
    memory_bytes: int = 512 * 1024 * 1024
    disk_bytes: int = 64 * 1024 * 1024
    pids: int = 64
    network: bool = False
    exec_seconds: float = 10.0
    output_bytes: int = 65_536


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one isolated command. ``exit_code`` is ``None`` when it was killed at its time limit."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    truncated: bool = False
    timed_out: bool = False
    seconds: float = 0.0


class FileKind(enum.StrEnum):
    """What stands at a path."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    OTHER = "other"


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a listing: path as a command inside would write it below the listed folder, size in bytes.

    Bytes of a name that are not UTF-8 are surrogate escapes, as ``os.fsdecode`` makes them; so they can be opened.
    """

    path: str
    kind: FileKind
    size: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a slot as they were. Any slot of its host can restore it, until the episode that took it ends."""

    id: str
    files: int
    size: int  # bytes of the files; what it takes may be less, where copies share blocks


class SandboxProcess(Protocol):
    """A command that goes on between calls, with its two ends. Ends at the latest with the episode."""

    @property
    def exit_code(self) -> int | None:
        """Its exit status; ``None`` while it runs."""
        ...

    async def write(self, data: bytes) -> None:
        """Feed its standard input. Raises ``ToolError`` when it has ended."""
        ...

    async def read(self, limit: int = 65_536) -> bytes:
        """Next part of its output (standard output and errors in one), at most ``limit`` bytes; empty at its end."""
        ...

    async def read_errors(self, limit: int = 65_536) -> bytes:
        """The same of its standard error, when it was started with errors ``apart``."""
        ...

    def errors_now(self, limit: int = 65_536) -> bytes:
        """What stands in its standard error at this moment, without waiting."""
        ...

    def follow_errors(self, descriptor: int) -> bool:
        """Take the pipe at ``descriptor`` of the command for its standard error from now on; whether that worked.

        What others still write into the one before is thrown away. The command has both ends of that pipe open.
        """
        ...

    def signal(self, number: int) -> None:
        """Send the command itself a signal. Nothing happens when it has ended."""
        ...

    def children(self) -> frozenset[Hashable]:
        """What it has started and still runs, as far as that can be seen."""
        ...

    async def kill_children(self, spare: frozenset[Any] = frozenset()) -> None:
        """Kill whatever it started, wherever that hides, and leave it alone itself.

        ``spare``: of :meth:`children`, to be left alone with what they start. What cannot be told apart or does not
        end takes the command with it.
        """
        ...

    def kill(self) -> None:
        """Kill it with everything it started, without waiting for the end; :meth:`close` does that."""
        ...

    async def close(self) -> None:
        """Kill it with everything it started; nothing of it is left afterwards."""
        ...


class Sandbox(Protocol):
    """What environment code and toolsets see as ``self.sandbox``: isolated commands and private files.

    Paths are those that a command inside sees: relative to its working folder, or absolute (``/workspace/…``,
    ``/tmp/…``, and with an image any other). Links are followed as a command inside would follow them, and never lead
    out.
    """

    @property
    def isolation(self) -> Isolation:
        """The level that :meth:`exec` reaches here."""
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> ExecResult:
        """Run ``argv`` isolated, in the workspace. Raises ``IsolationError`` when the level cannot be had."""
        ...

    async def start(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, apart: bool = False
    ) -> SandboxProcess:
        """Start ``argv`` isolated as :meth:`exec` does and leave it running. Raises ``IsolationError``.

        ``apart``: its errors are not joined with its output.
        """
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, making folders on its way. Raises ``ToolError`` that says why it cannot be."""
        ...

    async def read(self, path: str, limit: int = 1 << 20) -> bytes:
        """Read at most ``limit`` bytes of a file. Raises ``ToolError``."""
        ...

    async def list(self, path: str = ".", *, depth: int = 1, limit: int = 10_000) -> Sequence[FileEntry]:
        """Entries of a folder, sorted, down to ``depth`` levels and at most ``limit``. Raises ``ToolError``."""
        ...

    async def remove(self, path: str) -> None:
        """Remove a file, or a folder with all in it. Raises ``ToolError``."""
        ...

    async def snapshot(self) -> Snapshot:
        """Keep the files as they are now. Raises ``SandboxError`` when the host's room for snapshots is used up."""
        ...

    async def restore(self, snapshot: Snapshot) -> None:
        """Put the files back as they were in ``snapshot``, this slot's or another's (a fork). Ends what runs."""
        ...


class HostState(enum.StrEnum):
    """Life of a host as its backend sees it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    GONE = "gone"


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """One host: a gRPC address (``unix:/…`` or ``name:port``) and how many episodes it holds at once."""

    id: str
    address: str
    slots: int
    state: HostState = HostState.READY
    cause: str = ""  # why it is quarantined or gone
    isolation: Isolation = Isolation.NONE
    image: str = ""  # whose files its commands see; empty: its own system


class Backend(Protocol):
    """Makes hosts. Found under the entry-point group ``envfarm.backends``; one compliance suite fits all."""

    async def acquire(self, profile: SandboxProfile) -> Host:
        """A ready host for ``profile``; raises ``SandboxError`` with the cause when none can be had."""
        ...

    async def release(self, host_id: str) -> None:
        """End a host and all that it owns. Unknown ids are no error: the wish is fulfilled."""
        ...

    async def recycle(self, host_id: str, cause: str) -> Host:
        """Replace a host that failed or is dirty; the old one is gone when this returns."""
        ...

    async def list(self) -> Sequence[Host]:
        """Hosts of this backend, those adopted from an earlier process included."""
        ...

    def watch(self) -> AsyncIterator[Host]:
        """Every change of a host's state, from now on."""
        ...

    async def close(self, *, keep_hosts: bool = False) -> None:
        """Let go of everything; with ``keep_hosts`` the hosts live on to be adopted."""
        ...
