"""Where an episode runs: the profile it asks for, the host that serves it, and the backend that makes hosts."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

import msgspec


class Isolation(enum.StrEnum):
    """What stands between code that a model wrote and the machine, weakest first."""

    NONE = "none"
    BWRAP = "bwrap"
    GVISOR = "gvisor"
    CONTAINER = "container"
    POD = "pod"


class SandboxProfile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Resources and isolation of one slot. ``isolation`` concerns :meth:`Sandbox.exec`; environment code is trusted.

    Memory and disk are in bytes, ``cpus`` in cores, ``exec_seconds`` in seconds of wall time per call.
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


class Sandbox(Protocol):
    """What environment code and toolsets see as ``self.sandbox``: isolated commands and a private workspace."""

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

    async def write(self, path: str, data: bytes) -> None:
        """Write a file of the workspace (relative path; may not leave it)."""
        ...

    async def read(self, path: str, limit: int = 1 << 20) -> bytes:
        """Read at most ``limit`` bytes of a file of the workspace."""
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
