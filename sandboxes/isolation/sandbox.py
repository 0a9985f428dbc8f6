"""``self.sandbox`` of one slot: isolated commands with bounded time, memory, processes, disk and output."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from envfarm.core.errors import IsolationError, SandboxError
from envfarm.core.sandbox import ExecResult, Isolation, SandboxProfile
from sandboxes.isolation import bwrap, cgroups
from sandboxes.isolation.gate import Gate
from sandboxes.isolation.output import HeadTail
from sandboxes.isolation.user import sandbox_user
from sandboxes.isolation.workspace import Workspace

log = logging.getLogger(__name__)
FLOOD_FACTOR = 256  # a command that writes this many times what is kept is killed
_CHUNK = 1 << 16
_DISK_WATCH_SECONDS = 0.03
_KILL_SECONDS = 2.0


class SlotSandbox:
    """Implements :class:`envfarm.core.sandbox.Sandbox` for one slot and one profile."""

    def __init__(self, name: str, workspace: Workspace, profile: SandboxProfile, user: int | None) -> None:
        self._name = name
        self._user = user
        self._workspace = workspace
        self._profile = profile
        self._group: cgroups.SlotGroup | None = None

    @property
    def isolation(self) -> Isolation:
        """The level that :meth:`exec` reaches here."""
        if self._profile.isolation is not Isolation.BWRAP:
            return Isolation.NONE
        try:
            bwrap.require_bwrap()
        except IsolationError:
            return Isolation.NONE
        return Isolation.BWRAP

    @property
    def controls(self) -> frozenset[str]:
        """Bounds that hold for a whole command, of ``memory``, ``pids``, ``cpu``, ``disk``; others are per process."""
        group = self._group.controls if self._group is not None else frozenset[str]()
        return group | ({"disk"} if self._workspace.bounded else set())

    def prepare(self) -> None:
        """Have everything that :meth:`exec` needs, or raise :class:`IsolationError`. Blocking; off the loop."""
        self._require()
        self._workspace.prepare(self._profile.disk_bytes)
        if self._group is None and self._profile.isolation is Isolation.BWRAP:
            self._group = cgroups.make(self._name, self._profile)
            _say_once(self.controls)

    def fill(self, files: Mapping[str, bytes]) -> None:
        """Write the task's files. Blocking; off the loop."""
        self._workspace.prepare(self._profile.disk_bytes)
        self._workspace.fill(files)

    def empty(self) -> None:
        """Kill what is left and remove all files. Raises ``SandboxError`` when something stays. Blocking."""
        if self._group is not None:
            self._group.kill()
        self._workspace.empty()

    def close(self) -> None:
        """Let go of everything."""
        self.empty()
        if self._group is not None:
            self._group.remove()
            self._group = None

    async def write(self, path: str, data: bytes) -> None:
        """Write a file of the workspace (relative path; may not leave it)."""
        await asyncio.to_thread(self.fill, {path: data})

    async def read(self, path: str, limit: int = 1 << 20) -> bytes:
        """Read at most ``limit`` bytes of a file of the workspace."""
        await asyncio.to_thread(self._workspace.prepare, self._profile.disk_bytes)
        return await asyncio.to_thread(self._workspace.read, path, limit)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> ExecResult:
        """Run ``argv`` isolated, in the workspace. Raises ``IsolationError`` when the level cannot be had."""
        if self._group is None or not self._workspace.bounded:
            await asyncio.to_thread(self.prepare)
        limit = min(seconds, self._profile.exec_seconds) if seconds else self._profile.exec_seconds
        started = time.monotonic()
        gate = Gate(self._group.join_files) if self._group is not None and self._group.join_files else None
        process = await self._start(argv, env, limit, gate)
        run = _Run(process, self._profile.output_bytes, namespace=self._profile.isolation is Isolation.BWRAP)
        try:
            timed_out = await run.finish(stdin, limit, gate, None if self._workspace.bounded else self._too_big)
        finally:
            await run.kill()
        code = None if timed_out else process.returncode
        return run.result(code, timed_out=timed_out, seconds=time.monotonic() - started)

    async def _start(
        self, argv: Sequence[str], env: Mapping[str, str] | None, seconds: float, gate: Gate | None
    ) -> asyncio.subprocess.Process:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command(argv, env, seconds, gate),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                pass_fds=gate.child_fds if gate is not None else (),
                cwd=self._workspace.path,
            )
        except BaseException:
            if gate is not None:
                gate.drop()
            raise
        finally:
            if gate is not None:
                gate.started()
        return process

    def _require(self) -> None:
        if self._profile.isolation is Isolation.NONE:
            return  # the profile says so in as many words
        if self._profile.isolation is not Isolation.BWRAP:
            raise IsolationError(f"this host cannot isolate with {self._profile.isolation.value}; it offers bwrap")
        bwrap.require_bwrap()

    def _too_big(self) -> bool:
        return self._workspace.usage() > self._profile.disk_bytes

    def _command(
        self, argv: Sequence[str], env: Mapping[str, str] | None, seconds: float, gate: Gate | None
    ) -> list[str]:
        """A shell that takes the bounds upon itself and then becomes bubblewrap: cheaper than forking this process."""
        if self._profile.isolation is Isolation.NONE:
            inner = ["/usr/bin/env", *(f"{k}={v}" for k, v in (env or {}).items()), *argv]
        else:
            inner = bwrap.command(
                argv,
                workspace=self._workspace.path,
                profile=self._profile,
                env=env,
                user=self._user,
                before=self._bounds_inside(),
                gate=gate.words if gate is not None else (),
            )
        return ["/bin/sh", "-c", self._bounds(seconds) + 'exec "$@"', "sh", *inner]

    def _bounds_inside(self) -> str:
        if "pids" in self.controls:
            return ""
        # Inside the user namespace, where the kernel counts only the sandbox's own processes.
        return f"ulimit -p {self._profile.pids} 2>/dev/null || ulimit -u {self._profile.pids}; "

    def _bounds(self, seconds: float) -> str:
        profile = self._profile
        memory = profile.memory_bytes // 1024
        lines = [
            "ulimit -c 0",
            "ulimit -n 256",
            f"ulimit -t {int(seconds * max(1.0, profile.cpus)) + 1}",
            f"ulimit -f {max(1, profile.disk_bytes // 512)}",
            f"ulimit -d {memory}",
        ]
        if "memory" not in self.controls:
            lines.append(f"ulimit -v {memory}")
        return " && ".join(lines) + " && "


class _Run:
    """One command that runs: feeds it, reads it, kills it."""

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


@cache
def _say_once(controls: frozenset[str]) -> None:
    weak = {"memory", "pids", "cpu", "disk"} - controls
    note = f"; only per process or by watching: {', '.join(sorted(weak))}" if weak else ""
    log.info("sandboxed commands are bounded as a whole in: %s%s", ", ".join(sorted(controls)) or "nothing", note)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def slot_sandbox(ground: Path, slot: int, profile: SandboxProfile) -> SlotSandbox:
    """The sandbox of one slot on its own, with its workspace in ``ground`` (:func:`mounts.own_ground`)."""
    user = sandbox_user(slot)
    return SlotSandbox(f"{slot}-0", Workspace(ground / f"slot-{slot}", user), profile, user)
