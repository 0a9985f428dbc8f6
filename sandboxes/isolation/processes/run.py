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
from sandboxes.isolation.gate import Gate, buried
from sandboxes.isolation.processes.output import HeadTail

FLOOD_FACTOR = 256  # a command that writes this many times what is kept is killed
_CHUNK = 1 << 16
_WATCH_SECONDS = 0.03
_KILL_SECONDS = 2.0
_LOOK_SECONDS = 0.002
_BWRAP_FAILED, _NOT_EXECUTABLE, _NOT_FOUND = 1, 126, 127  # the last two as a shell has them


class Run:
    """A started command. ``gate``: of bubblewrap, when that confines it; closed when the command is gone.

    ``own_doing``: whether what bubblewrap said when it could not set the command up is the slot's own matter.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        output_bytes: int,
        gate: Gate | None,
        own_doing: Callable[[bytes], bool] = lambda said: False,  # noqa: ARG005 - of a callback
    ) -> None:
        self._process = process
        self._own_doing = own_doing
        self._gate = gate
        self._executed = True
        self._outputs = (HeadTail(output_bytes), HeadTail(output_bytes))
        self._flood = FLOOD_FACTOR * output_bytes
        self._cause = ""  # why others ended it

    @property
    def pid(self) -> int:
        """Of what was started, which this object waits for."""
        return self._process.pid

    async def finish(self, stdin: bytes, seconds: float, excess: Callable[[], bool] | None) -> bool:
        """Let it go and wait for its end; returns whether it had to be ended at its time limit.

        ``excess``: asked again and again, in a thread, whether it takes more than its share; then it is killed.
        """
        try:
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
                opening = tasks.create_task(self._gate.open()) if self._gate is not None else None
                tasks.create_task(self._feed(stdin))
                for stream, output in zip((self._process.stdout, self._process.stderr), self._outputs, strict=True):
                    tasks.create_task(self._drain(stream, output))
                watch = tasks.create_task(self._watch(excess)) if excess is not None else None
                await self._process.wait()
                if self._gate is not None and opening is not None:
                    await opening  # it reads what bubblewrap said as well
                    self._executed = self._gate.executed()
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

    async def _drain(self, stream: asyncio.StreamReader | None, output: HeadTail) -> None:
        while stream is not None and (data := await stream.read(_CHUNK)):
            output.feed(data)
            if output.total > self._flood:
                self._signal()

    async def _watch(self, excess: Callable[[], bool]) -> None:
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            if await asyncio.to_thread(excess):
                self._signal()
                return

    def _signal(self) -> None:
        """Kill bubblewrap's child, process 1 of the namespace, so that bubblewrap can wait for the end of all of it."""
        inside = _children(self._process.pid) if self._gate is not None else []
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
        if self._gate is not None:
            try:
                await self._gate.emptied()
                await self._bury()
            finally:
                self._gate.drop()

    async def _bury(self) -> None:
        """Bury what bubblewrap had begun when it was killed before it could tell of it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_SECONDS):
                while not buried(self._process.pid):  # noqa: ASYNC110 - others make it so
                    await asyncio.sleep(_LOOK_SECONDS)

    def end(self, cause: str) -> None:
        """Kill it, from any thread, without waiting. Whoever waits for it hears why, if it did not run yet."""
        if self._process.returncode is None:
            self._cause = cause
            self._signal()

    def result(self, *, timed_out: bool, seconds: float) -> ExecResult:
        """What came of it. Raises :class:`SandboxError` when it never came to run."""
        if self._cause and self._gate is not None and not self._gate.opened:
            raise SandboxError(f"a command was ended before it ran: {self._cause}")
        out, err = self._outputs
        return ExecResult(
            exit_code=None if timed_out else self._exit_code(err.value()),
            stdout=out.value(),
            stderr=err.value(),
            truncated=out.truncated or err.truncated,
            timed_out=timed_out,
            seconds=seconds,
        )

    def _exit_code(self, said: bytes) -> int | None:
        code = self._process.returncode
        if self._executed or code != _BWRAP_FAILED:
            return code
        if said.startswith(b"bwrap: execvp "):
            return _NOT_FOUND if b"No such file" in said else _NOT_EXECUTABLE
        if self._own_doing(said):
            return _NOT_EXECUTABLE
        raise SandboxError(f"a command could not be set up: {said.decode(errors='replace').strip()}")


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
