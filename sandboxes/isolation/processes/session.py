"""One isolated command that goes on between calls: fed, read, signalled, cleared of what it started, ended.

There is no task behind it and nothing is read ahead, so that none can be left over: what it writes and nobody reads
stays in the kernel's pipe, and it waits. All of it may be used from any loop and ended from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

import psutil

from envfarm.core.errors import SandboxError, ToolError
from sandboxes.isolation.gate import Gate, buried
from sandboxes.isolation.processes.inhabitants import Inhabitant, Inhabitants
from sandboxes.isolation.processes.pipes import PipeEnd

_KILL_SECONDS = 2.0
_DISCARD_SECONDS = 0.1
_LOOK_SECONDS = 0.002
_BWRAP_FAILED, _NOT_FOUND = 1, 127


class Session:
    """Implements :class:`envfarm.core.sandbox.SandboxProcess`.

    ``ended``: told once all of it is gone. ``write_seconds``: how long it may leave its input unread.
    """

    def __init__(
        self,
        *,
        gate: Gate | None,
        write_seconds: float,
        ended: Callable[[Session], None],
    ) -> None:
        self._gate = gate
        self._write_seconds = write_seconds
        self._ended = ended
        self._child: subprocess.Popen[bytes] | None = None
        self._code: int | None = None
        self._over = False
        self._ending = threading.Lock()
        self._input: PipeEnd
        self._output: PipeEnd
        self._errors: PipeEnd | None = None
        self._past: list[PipeEnd] = []  # what the command wrote to before; others may still do

    def spawn(self, argv: Sequence[str], *, cwd: str, env: dict[str, str] | None, apart: bool) -> None:
        """Start ``argv``. On the loop's own thread: it is killed when the thread that started it ends."""
        theirs: list[int] = []
        ours: list[PipeEnd] = []
        try:
            for writing in (True, False, *([False] if apart else [])):
                reader, writer = os.pipe()
                mine, other = (writer, reader) if writing else (reader, writer)
                ours.append(PipeEnd(mine, writing=writing))
                theirs.append(other)
            self._child = subprocess.Popen(  # noqa: S603 - ours
                argv,
                stdin=theirs[0],
                stdout=theirs[1],
                stderr=theirs[2] if apart else subprocess.STDOUT,
                start_new_session=True,
                pass_fds=self._gate.child_fds if self._gate is not None else (),
                cwd=cwd,
                env=env,
            )
        except BaseException:
            for end in ours:
                end.close()
            if self._gate is not None:
                self._gate.drop()
            raise
        finally:
            if self._gate is not None:
                self._gate.started()
            for fd in theirs:
                os.close(fd)
        self._input, self._output = ours[:2]
        self._errors = ours[2] if apart else None

    async def open_gate(self) -> None:
        """Let it go. Raises :class:`SandboxError`."""
        if self._gate is not None:
            await self._gate.open()

    @property
    def exit_code(self) -> int | None:
        """Its exit status; ``None`` while it runs."""
        if not self._over and self._process.poll() is not None:
            self.end()
        return self._code

    @property
    def running(self) -> bool:
        """Whether it has not ended yet; asking ends nothing, so that what it said last can still be read."""
        return not self._over and self._process.poll() is None

    async def write(self, data: bytes) -> None:
        """Feed its standard input. Raises ``ToolError`` when it has ended or does not read for too long."""
        try:
            async with asyncio.timeout(self._write_seconds):
                await self._input.write(data)
        except BrokenPipeError:
            raise ToolError("error: the process has ended and takes no more input") from None
        except TimeoutError:
            raise ToolError(f"error: the process has not read its input for {self._write_seconds:g} s") from None

    async def read(self, limit: int = 65_536) -> bytes:
        """Next part of its standard output (with errors, unless these are apart); empty at its end."""
        return await self._part(self._output, limit)

    async def read_errors(self, limit: int = 65_536) -> bytes:
        """The same of its standard error, when it was started with errors apart."""
        if self._errors is None:
            return b""
        return await self._part(self._errors, limit)

    def errors_now(self, limit: int = 65_536) -> bytes:
        """What stands in its standard error at this moment."""
        return (self._errors.read_now(limit) if self._errors is not None else None) or b""

    async def _part(self, end: PipeEnd, limit: int) -> bytes:
        while self._past:
            self._past = [past for past in self._past if past.discard()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DISCARD_SECONDS):
                    return await end.read(limit)
        return await end.read(limit)

    def follow_errors(self, descriptor: int) -> bool:
        """Read errors from the pipe at ``descriptor`` of the command from now on; whether that was possible.

        What others still write into the pipe before is read and thrown away.
        """
        inside = self._inside()
        try:
            if inside is None:
                return False
            fd = inside.open_for_reading(descriptor)
        except LookupError:
            return False
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.close(fd)
            return False
        if self._errors is not None:
            self._past.append(self._errors)
        self._errors = PipeEnd(fd)
        return True

    def signal(self, number: int) -> None:
        """Send the command itself a signal; nothing happens when it has ended or cannot be told from the rest."""
        inside = self._inside()
        with contextlib.suppress(LookupError, ProcessLookupError, PermissionError):
            if inside is not None:
                inside.signal(number)
            elif self._gate is None and self._process.poll() is None:
                os.kill(self._process.pid, number)

    def children(self) -> frozenset[Inhabitant]:
        """What it has started and still runs, as far as it can be seen."""
        try:
            inside = self._inside()
            return inside.others() if inside is not None else frozenset()
        except LookupError:
            return frozenset()

    async def kill_children(self, spare: frozenset[Inhabitant] = frozenset()) -> None:
        """Kill whatever it started, wherever that hides, but ``spare`` and what these started; not itself.

        Where that cannot be seen or does not end, all of it is ended, the command too.
        """
        if not await asyncio.to_thread(self._kill_children, spare):
            await self.close()

    def _kill_children(self, spare: frozenset[Inhabitant]) -> bool:
        if self._over:
            return True
        inside = self._inside()
        if inside is None:
            return self._gate is None and self._kill_descendants()
        try:
            return inside.kill_others(spare, _KILL_SECONDS)
        except LookupError:
            return self._process.poll() is not None

    def _kill_descendants(self) -> bool:
        deadline = time.monotonic() + _KILL_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(psutil.NoSuchProcess):
                left = psutil.Process(self._process.pid).children(recursive=True)
                left = [each for each in left if each.status() != psutil.STATUS_ZOMBIE]
                for each in left:
                    each.kill()
                if left:
                    time.sleep(0.002)
                    continue
            return True
        return False

    async def close(self) -> None:
        """Kill it with everything it started; nothing of it is left afterwards."""
        self.kill()  # at once: whoever is cancelled while waiting leaves nothing that runs
        await asyncio.to_thread(self.end)

    def kill(self) -> None:
        """Kill it with everything in its namespace, without waiting."""
        first = self._gate.pid if self._gate is not None else None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._over or self._process.poll() is not None:
                return
            if first is not None:
                os.kill(first, signal.SIGKILL)  # bubblewrap waits for the end of all of it, then ends
            else:
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it, wait until nothing is left, let go of everything. Blocking, from any thread, any number of times.

        Raises :class:`SandboxError` when something stays; then it can be tried again.
        """
        with self._ending:
            if self._over:
                return
            self.kill()
            try:
                code = self._process.wait(_KILL_SECONDS)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                try:
                    code = self._process.wait(_KILL_SECONDS)
                except subprocess.TimeoutExpired:
                    raise SandboxError("a process of the sandbox cannot be killed") from None
            if self._gate is not None:
                _await_end(self._gate.find_first())
                _bury(self._process.pid)
            if code == _BWRAP_FAILED and self._gate is not None and not self._gate.executed():
                code = _NOT_FOUND
            self._code = code
            self._over = True
            for end in (self._input, self._output, self._errors, *self._past):
                if end is not None:
                    end.close()
            if self._gate is not None:
                self._gate.drop()
        self._ended(self)

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            raise SandboxError("the process was not started")
        return self._child

    def _inside(self) -> Inhabitants | None:
        pid = self._gate.pid if self._gate is not None and not self._over else None
        return Inhabitants(pid) if pid is not None else None


def _bury(group: int) -> None:
    """Bury what bubblewrap had begun when it was killed before it could tell of it."""
    deadline = time.monotonic() + _KILL_SECONDS
    while not buried(group) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


def _await_end(first: int | None) -> None:
    """Wait for the namespace's first process, which is the last to go, and bury it if it came to us."""
    if first is None:
        return
    try:
        poll = select.poll()
        poll.register(first, select.POLLIN)
        if not poll.poll(_KILL_SECONDS * 1000):
            raise SandboxError(f"processes of a command outlive it by {_KILL_SECONDS:.0f} s")
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, first, os.WEXITED | os.WNOHANG)
    finally:
        os.close(first)
