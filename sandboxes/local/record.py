"""What is written down about a host process, so that a later gateway finds it again and nothing is left behind.

A process is named by its id *and* its start time: ids are used again.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import msgspec
import psutil

from envfarm.core.errors import SandboxError
from sandboxes.hosting.sockets import socket_path


class HostRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One host process. ``folder`` is a short one under /tmp when the socket's path would be too long."""

    id: str
    pid: int
    started: float
    address: str
    environments: tuple[str, ...]
    slots: int
    folder: str = ""

    def alive(self) -> bool:
        """Whether that very process runs."""
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.started) < 0.05 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


class HostFolder:
    """``STATE/hosts``: record, address file, socket and log of each host."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / "hosts"

    def prepare(self) -> None:
        """Make the folder; nobody else may look into it, for a socket in it needs no token.

        Raises :class:`SandboxError` when it cannot be had.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
        except OSError as error:
            raise SandboxError(f"cannot use {self.path} as the folder of hosts: {error.strerror}") from error

    def log(self, host_id: str) -> Path:
        """Where a host's errors go."""
        return self.path / f"{host_id}.log"

    def address_file(self, host_id: str) -> Path:
        """Where a host writes its address once it serves."""
        return self.path / f"{host_id}.address"

    def socket(self, host_id: str) -> tuple[str, str]:
        """Path of the socket, and the folder made for it when the usual path is too long (else empty)."""
        path, folder = socket_path(self.path.resolve() / f"{host_id}.sock")
        return str(path), folder

    def write(self, record: HostRecord) -> None:
        """Store ``record`` atomically."""
        file = self.path / f"{record.id}.json"
        partial = file.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(record))
        partial.replace(file)

    def records(self) -> list[HostRecord]:
        """Every stored record, oldest first; unreadable ones are dropped."""
        found = []
        for file in sorted(self.path.glob("*.json")):
            try:
                found.append(msgspec.json.decode(file.read_bytes(), type=HostRecord))
            except (OSError, msgspec.DecodeError):
                file.unlink(missing_ok=True)
        return found

    def forget(self, record: HostRecord) -> None:
        """Remove what belongs to a host that has ended; its log stays."""
        (self.path / f"{record.id}.json").unlink(missing_ok=True)
        self.address_file(record.id).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            Path(record.address.removeprefix("unix:")).unlink(missing_ok=True)
        if record.folder:
            shutil.rmtree(record.folder, ignore_errors=True)
