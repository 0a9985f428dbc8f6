"""The environment with which a backend is tried: it runs what it is told, in the sandbox of its slot."""

from __future__ import annotations

import json

from envfarm.core.environment import Environment, tool
from envfarm.core.sandbox import SandboxProfile
from envfarm.core.task import Limits, Task

_kept = {}


class Trial(Environment):
    """Runs commands and moves files."""

    executes = True
    limits = Limits(steps=50, seconds=120, tool_seconds=60, result_bytes=65_536)
    profile = SandboxProfile(exec_seconds=20, disk_bytes=8 * 2**20)

    def tasks(self, split):
        return [Task(id="trial", prompt="go")]

    @tool
    async def run(self, command: str, seconds: float = 20.0) -> str:
        """Runs a line of shell; answers with JSON."""
        result = await self.sandbox.exec(["/bin/sh", "-c", command], seconds=seconds)
        return json.dumps([result.exit_code, result.stdout.decode(), result.stderr.decode(), result.timed_out])

    @tool
    async def converse(self, line: str) -> str:
        """Says a line to a process that goes on, and hears its answer."""
        process = await self.sandbox.start(["/bin/sh", "-c", 'while read -r said; do echo "heard $said"; done'])
        try:
            await process.write(f"{line}\n".encode())
            return (await process.read()).decode()
        finally:
            await process.close()

    @tool
    async def write(self, path: str, text: str) -> None:
        """Writes a file."""
        await self.sandbox.write(path, text.encode())

    @tool
    async def read(self, path: str) -> str:
        """Reads a file."""
        return (await self.sandbox.read(path)).decode()

    @tool
    async def names(self) -> str:
        """Lists the workspace."""
        return ",".join(entry.path for entry in await self.sandbox.list("."))

    @tool
    async def keep(self) -> None:
        """Takes a snapshot."""
        _kept["snapshot"] = await self.sandbox.snapshot()

    @tool
    async def go_back(self) -> None:
        """Restores it, in whatever slot this is."""
        await self.sandbox.restore(_kept["snapshot"])
