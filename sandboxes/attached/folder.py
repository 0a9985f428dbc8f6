"""The folder where attached hosts listen, and the claims that say which gateway has which of them.

A claim is a file ``ID.taken`` beside the sockets, made so that only one can make it; its text names the gateway. Hosts
have a new id at every start, so a claim never outlives what it is about.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

from envfarm.core.errors import SandboxError
from envfarm.core.ids import new_id

OLD_SECONDS = 60.0
_CONNECT_SECONDS = 1.0
_TAKEN = ".taken"


class AttachedFolder:
    """Sockets and claims in ``path``, for the gateway whose state is in ``state_dir``. Every method does file I/O."""

    def __init__(self, path: Path, state_dir: Path) -> None:
        self.path = path
        self._state_dir = state_dir
        self._owner = ""

    def prepare(self) -> None:
        """Make the folder, and a name for this gateway that stays. Raises :class:`SandboxError`."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            name = self._state_dir / "attached"
            if not name.exists():
                name.write_text(new_id("gateway"))
            self._owner = name.read_text()
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(13, "no leave to write there; hosts and gateway must be the same user")
        except OSError as error:
            raise SandboxError(f"cannot use {self.path} as the folder of attached hosts: {error.strerror}") from error

    def sockets(self) -> list[Path]:
        """Those that somebody listens on, oldest first. What hosts that were killed left behind is removed."""
        found = []
        for file in self.path.glob("*.sock"):
            with contextlib.suppress(OSError):
                changed = file.stat().st_mtime
                if listens(file):
                    found.append((changed, file))
                elif time.time() - changed > OLD_SECONDS:  # a younger one may be about to listen
                    file.unlink(missing_ok=True)
        return [file for _, file in sorted(found)]

    def claim(self, host_id: str) -> bool:
        """Take a host; ``False`` when another gateway has it."""
        try:
            with (self.path / f"{host_id}{_TAKEN}").open("x") as file:
                file.write(self._owner)
        except FileExistsError:
            return False
        except OSError as error:
            raise SandboxError(f"cannot write into {self.path}: {error.strerror}") from error
        return True

    def claimed(self) -> list[str]:
        """Ids of the hosts that this gateway has, in the order of their start."""
        mine = []
        for file in sorted(self.path.glob(f"*{_TAKEN}")):
            with contextlib.suppress(OSError):
                if file.read_text() == self._owner:
                    mine.append(file.name.removesuffix(_TAKEN))
        return mine

    def forget(self, host_id: str) -> None:
        """Give up a claim; the host has ended."""
        (self.path / f"{host_id}{_TAKEN}").unlink(missing_ok=True)


def listens(file: Path) -> bool:
    """Whether somebody takes connections at a unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_SECONDS)
        try:
            probe.connect(str(file))
        except (BlockingIOError, TimeoutError):
            return True  # its queue is full: it is there, and slow
        except OSError:
            return False
    return True
