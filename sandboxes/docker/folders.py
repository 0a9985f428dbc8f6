"""``STATE/docker``: who this backend is, and one folder per host that its container shares with the gateway.

A folder whose socket would have too long a path lies under /tmp, with a link to it here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from envfarm.core.errors import SandboxError
from envfarm.core.ids import new_id
from sandboxes.docker.container import SOCKET
from sandboxes.hosting.sockets import socket_path

_OWNER = "owner"
_LOCK = "lock"


class HostFolders:
    """The folders of one backend. Blocking; off the loop."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir.absolute() / "docker"
        self._lock = -1

    def prepare(self) -> str:
        """Make the folder, which nobody else may enter, and return the name under which its containers go.

        Raises :class:`SandboxError` when it cannot be had.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
            self._hold()
            return self._owner()
        except OSError as error:
            raise SandboxError(f"cannot use {self.path} as the folder of hosts: {error.strerror}") from error

    def make(self, host_id: str, user: int) -> Path:
        """A folder for ``host_id`` that only ``user`` (and root) may enter. Raises :class:`SandboxError`."""
        try:
            usual = self.path.resolve() / host_id
            socket, short = socket_path(usual / SOCKET)
            if short:
                usual.symlink_to(short)
            else:
                usual.mkdir(mode=0o700)
            if user != os.geteuid():
                os.chown(socket.parent, user, user)
        except OSError as error:
            self.remove(host_id)
            raise SandboxError(f"cannot make a folder for host {host_id} in {self.path}: {error}") from error
        return socket.parent

    def remove(self, host_id: str) -> None:
        """Remove the folder of ``host_id``, if there is one."""
        folder = self.path / host_id
        if folder.is_symlink():
            shutil.rmtree(folder.readlink(), ignore_errors=True)
            folder.unlink(missing_ok=True)
        elif host_id:
            shutil.rmtree(folder, ignore_errors=True)

    def all(self) -> list[str]:
        """Ids of hosts that have a folder."""
        with contextlib.suppress(OSError):
            return [entry.name for entry in os.scandir(self.path) if entry.is_symlink() or entry.is_dir()]
        return []

    def close(self) -> None:
        """Somebody else may look after what is here."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _hold(self) -> None:
        """Show to others that somebody looks after what is here; shared, for a gateway keeps others out itself."""
        if self._lock < 0:
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _owner(self) -> str:
        file = self.path / _OWNER
        if not file.exists():
            partial = file.with_suffix(".partial")
            partial.write_text(new_id("farm"))
            partial.replace(file)
        return file.read_text().strip()


def held(path: Path) -> bool | None:
    """Whether a backend looks after :attr:`HostFolders.path`; ``None`` when that cannot be seen from here."""
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(lock)
