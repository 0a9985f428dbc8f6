"""An interpreter that a toolset keeps from call to call: at most one, one call at a time, gone with the episode."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Sequence

from envfarm.core.environment import Toolset
from envfarm.core.errors import ToolError
from envfarm.core.sandbox import Sandbox, SandboxProcess

_STOPPING_SECONDS = 2.0  # what stopping a request may take
_NOT_FOUND = 127  # of a shell
_END_SECONDS, _LOOK_SECONDS = 0.5, 0.01


class KeptProcess:
    """Guards the process, if there is one."""

    def __init__(self) -> None:
        self._process: SandboxProcess | None = None
        self._lock: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Held during a call. One that is cut off leaves the process at nobody knows what: it is killed.

        So it is when the loop of an earlier call was given up.
        """
        loop = asyncio.get_running_loop()
        if self._lock is None or self._loop is not loop:
            if self._lock is not None and self._lock.locked():
                self.forget()
            self._lock, self._loop = asyncio.Lock(), loop
        async with self._lock:
            try:
                yield
            except ToolError:
                raise
            except BaseException:
                self.forget()
                raise

    @property
    def running(self) -> SandboxProcess | None:
        """The process, unless it has ended."""
        if self._process is not None and self._process.exit_code is not None:
            self._process = None
        return self._process

    async def start(self, sandbox: Sandbox, argv: Sequence[str]) -> SandboxProcess:
        """Start it, errors apart."""
        self._process = await sandbox.start(argv, apart=True)
        return self._process

    async def close(self, *, ends: bool = False) -> int | None:
        """End it, with all that it started. ``ends``: it does so by itself, and how is returned."""
        process, self._process = self._process, None
        if process is None:
            return None
        rounds = int(_END_SECONDS / _LOOK_SECONDS) if ends else 0
        while process.exit_code is None and rounds:
            rounds -= 1
            await asyncio.sleep(_LOOK_SECONDS)
        code = process.exit_code
        await process.close()
        return code

    def forget(self) -> None:
        """Kill it without waiting; the slot sees to its end."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()


def missing(code: int | None, said: str) -> bool:
    """Whether a process that ended before it answered anything is a program that is not there.

    Asked only while nothing of the model's ran in it, which could say and return the same.
    """
    return code == _NOT_FOUND and (not said.startswith("bwrap: ") or said.startswith("bwrap: execvp "))


def time_limit(toolset: Toolset) -> float:
    """Seconds for one request, so that stopping it fits into what a tool call may take."""
    environment = toolset.environment
    most = min(environment.profile.exec_seconds, environment.limits.tool_seconds)
    return max(most - _STOPPING_SECONDS, most / 2)


def ending(otherwise: str, code: int | None) -> str:
    """How a process ended, as the rest of a sentence about it."""
    if code is None:
        return otherwise
    if code in (128 + signal.SIGKILL, -signal.SIGKILL):
        return "was killed (it may have used too much memory)"
    if code > 128 and code - 128 in set(signal.Signals):
        return f"ended by signal {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"
