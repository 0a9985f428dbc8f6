"""One isolated command while it runs: fed, read, watched, killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

from envfarm.core.errors import SandboxError
from envfarm.core.sandbox import ExecResult
from sandboxes.isolation.gate import Gate
from sandboxes.isolation.output import HeadTail

FLOOD_FACTOR = 256  # a command that writes this many times what is kept is killed
_CHUNK = 1 << 16
_DISK_WATCH_SECONDS = 0.03
_KILL_SECONDS = 2.0


class Run:
    """A started command. ``namespace``: bubblewrap confines it, and ends with its first process."""

    def __init__(self, process: asyncio.subprocess.Process, output_bytes: int, *, namespace: bool) -> None:
        self._process = process
        self._gently = namespace
        self._outputs = (HeadTail(output_bytes), HeadTail(output_bytes))
        self._flood = FLOOD_FACTOR * output_bytes

    async def finish(self, stdin: bytes, seconds: float, gate: Gate | None, too_big: Callable[[], bool] | None) -> bool:
        """Let it go and wait for its end; returns whether it had to be ended at its time limit."""
        try:
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
                if gate is not None:
                    tasks.create_task(gate.open())
                tasks.create_task(self._feed(stdin))
                for stream, output in zip((self._process.stdout, self._process.stderr), self._outputs, strict=True):
                    tasks.create_task(self._drain(stream, output))
                watch = tasks.create_task(self._watch_disk(too_big)) if too_big is not None else None
                await self._process.wait()
                if watch is not None:
                    watch.cancel()
        except TimeoutError:
            return True
        except BaseExceptionGroup as failed:
            sandbox, others = failed.split(SandboxError)
            if sandbox is not None and others is None:
                raise sandbox.exceptions[0] from None
            raise
        return False

    async def _feed(self, data: bytes) -> None:
        pipe = self._process.stdin
        if pipe is None:
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if data:
                pipe.write(data)
                await pipe.drain()
            pipe.close()
            await pipe.wait_closed()

    async def _drain(self, stream: asyncio.StreamReader | None, output: HeadTail) -> None:
        while stream is not None and (data := await stream.read(_CHUNK)):
            output.feed(data)
            if output.total > self._flood:
                self._signal()

    async def _watch_disk(self, too_big: Callable[[], bool]) -> None:
        while True:
            await asyncio.sleep(_DISK_WATCH_SECONDS)
            if await asyncio.to_thread(too_big):
                self._signal()
                return

    def _signal(self) -> None:
        """Kill bubblewrap's child, process 1 of the namespace, so that bubblewrap can wait for the end of all of it."""
        inside = _children(self._process.pid) if self._gently else []
        for pid in inside:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not inside:
            self._signal_group()

    def _signal_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def kill(self) -> None:
        """Whatever happened, the whole process group is gone afterwards (the namespace's first process with it)."""
        if self._process.returncode is None:
            for end in (self._signal, self._signal_group):
                end()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_KILL_SECONDS):
                        await asyncio.shield(self._process.wait())
                        break
        transport = getattr(self._process, "_transport", None)
        if transport is not None:
            transport.close()  # pipes that a grandchild might still hold

    def result(self, code: int | None, *, timed_out: bool, seconds: float) -> ExecResult:
        """What came of it."""
        out, err = self._outputs
        return ExecResult(
            exit_code=code,
            stdout=out.value(),
            stderr=err.value(),
            truncated=out.truncated or err.truncated,
            timed_out=timed_out,
            seconds=seconds,
        )


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
