"""Who sandboxed commands are, outside their user namespace.

Never root: to the kernel a process that root started stays root's in everything that asks only for an owner (device
nodes, many files under /proc/sys), whatever it is called inside its namespace.
"""

from __future__ import annotations

import os
import shutil

from envfarm.core.errors import IsolationError

FIRST = 61_184  # users that systemd keeps for services made on the fly; nobody's files belong to them
COUNT = 4_000


def sandbox_user(slot: int) -> int | None:
    """User id for the commands of ``slot``; ``None`` when this process is not root and stays who it is."""
    return FIRST + slot % COUNT if os.geteuid() == 0 else None


def becoming(user: int | None) -> list[str]:
    """Words before a command line that make it run as ``user``. Raises :class:`IsolationError`."""
    if user is None:
        return []
    path = shutil.which("setpriv")
    if path is None:
        raise IsolationError(
            "setpriv is not on PATH, and code that a model wrote must not run as root; "
            "install it with: apt-get install util-linux"
        )
    return [path, "--reuid", str(user), "--regid", str(user), "--clear-groups", "--"]
