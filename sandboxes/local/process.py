"""One host process, a child of ours or one that an earlier gateway left: told of its end by the kernel (pidfd)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil

from envfarm.core.errors import SandboxError

TERM_SECONDS = 8.0
KILL_SECONDS = 5.0


class HostProcess:
    """Watches a process and ends it with everything it started. Use from one event loop."""

    def __init__(self, pid: int, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._child = child
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = -1
            self.ended.set()
        else:
            self._loop.add_reader(self._fd, self._on_end)

    @property
    def status(self) -> str:
        """How it ended, as far as can be known."""
        code = self._child.returncode if self._child is not None else None
        if code is None:
            return "it ended"
        return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with status {code}"

    async def end(self) -> None:
        """SIGTERM, then SIGKILL for it and all its descendants. Raises :class:`SandboxError` when one stays."""
        family = await asyncio.to_thread(_descendants, self.pid)
        if not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TERM_SECONDS):
                    await self.ended.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(KILL_SECONDS):
                await self.ended.wait()
        except TimeoutError:
            raise SandboxError(f"host process {self.pid} does not end, even by SIGKILL") from None
        left = await asyncio.to_thread(_end_all, family)
        if left:
            raise SandboxError(f"processes of host process {self.pid} do not end: {', '.join(map(str, left))}")

    def forget(self) -> None:
        """Stop watching; the process goes on."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        if self._child is not None:
            self._child.returncode = self._child.returncode or 0  # it is not ours to wait for any more

    def _on_end(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1
        if self._child is not None:
            self._child.wait()
        else:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, os.WNOHANG)  # a child after all, of an earlier backend in this process
        self.ended.set()


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _end_all(family: list[psutil.Process]) -> list[int]:
    """Kill what is left of ``family``; returns the ids of those that stay."""
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(family, timeout=KILL_SECONDS)
    return [process.pid for process in alive]


def last_lines(log: Path, count: int = 8) -> str:
    """End of a log, for an error message."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-count:]
    except OSError:
        lines = []
    return "\n  ".join(lines) or "(it wrote nothing)"
