"""Environments whose hosts are hard to have or to keep, or that ask for a level of isolation."""

from __future__ import annotations

import os

from envfarm.core.environment import Environment, tool
from envfarm.core.sandbox import Isolation, SandboxProfile
from envfarm.core.task import Limits, Task


class _House(Environment):
    limits = Limits(steps=10, seconds=60)

    def tasks(self, split):
        return [Task(id="t", prompt="go")]

    @tool
    async def uname(self) -> str:
        """What the kernel says that it is."""
        result = await self.sandbox.exec(["/bin/cat", "/proc/version"])
        return result.stdout.decode()


class Imaged(_House):
    """Wants an image."""

    profile = SandboxProfile(image="no-such-image:1")


class Crashing(_House):
    """Ends the process that it runs in."""

    def reset(self, task):
        os._exit(3)


class Deep(_House):
    """Runs under gVisor."""

    executes = True
    profile = SandboxProfile(isolation=Isolation.GVISOR, exec_seconds=20)


class Flat(_House):
    """Runs under bubblewrap."""

    executes = True


class Boxed(_House):
    """Wants what this machine's hosts are not in."""

    executes = True
    profile = SandboxProfile(isolation=Isolation.POD)
