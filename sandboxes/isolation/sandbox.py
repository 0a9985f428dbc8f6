"""``self.sandbox`` of one slot: isolated commands with bounded time, memory, processes, disk and output."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from envfarm.core.errors import IsolationError
from envfarm.core.sandbox import ExecResult, FileEntry, Isolation, SandboxProfile, Snapshot
from sandboxes.isolation import cgroups, cleanliness
from sandboxes.isolation.command_line import EPISODE_SECONDS, OUTSIDE, command_line, require_words
from sandboxes.isolation.files import access
from sandboxes.isolation.files.interruptible import Interrupted, interruptible, to_the_end
from sandboxes.isolation.files.paths import Tree
from sandboxes.isolation.files.workspace import Workspace
from sandboxes.isolation.gate import Gate
from sandboxes.isolation.levels import outside, reached
from sandboxes.isolation.processes.blame import own_doing
from sandboxes.isolation.processes.memory import exceeds
from sandboxes.isolation.processes.run import Run
from sandboxes.isolation.processes.session import Session
from sandboxes.isolation.processes.watch import Watch
from sandboxes.isolation.surroundings import MACHINE, Surroundings
from sandboxes.isolation.turns import Turns
from sandboxes.isolation.user import sandbox_user

log = logging.getLogger(__name__)
T = TypeVar("T")


class SlotSandbox:
    """Implements :class:`envfarm.core.sandbox.Sandbox` for one slot and one profile."""

    def __init__(
        self,
        name: str,
        workspace: Workspace,
        profile: SandboxProfile,
        user: int | None,
        surroundings: Surroundings = MACHINE,
    ) -> None:
        self._name = name
        self._surroundings = surroundings
        self._user = user
        self._workspace = workspace
        self._folder = workspace.path.parent
        self._profile = profile
        self._granted = outside(profile)
        self._group: cgroups.SlotGroup | None = None
        self._bounds: dict[str, str] = {}  # of the group, at its start
        self._touched = False
        self._changing = threading.Lock()
        self._turns = Turns()
        self._sessions: set[Session] = set()
        self._watch = Watch()
        self._runs: set[Run] = set()

    @property
    def isolation(self) -> Isolation:
        """The level that :meth:`exec` reaches here."""
        try:
            return reached(self._profile.isolation, self._surroundings)
        except IsolationError:
            return Isolation.NONE

    @property
    def controls(self) -> frozenset[str]:
        """Bounds that hold for a whole command, of ``memory``, ``pids``, ``cpu``, ``disk``; others are per process."""
        group = self._group.controls if self._group is not None else frozenset[str]()
        return group | ({"disk"} if self._workspace.bounded else set())

    def prepare(self) -> None:
        """Have everything that :meth:`exec` needs, or raise :class:`IsolationError`. Blocking; off the loop."""
        reached(self._profile.isolation, self._surroundings)
        with self._changing:
            self._prepare_files()
            if self._group is None and self._profile.isolation is not Isolation.NONE:
                self._group = cgroups.make(self._name, self._granted)
                self._bounds = self._group.bounds()
                _say_once(self.controls)

    def _prepare_files(self) -> None:
        self._workspace.prepare(self._profile.disk_bytes)
        if not self._touched and cleanliness.canary_in(self._folder) is None:
            cleanliness.lay_canary(self._folder)

    def fill(self, files: Mapping[str, bytes]) -> None:
        """Write the task's files. Blocking; off the loop."""
        with self._turns.shared():
            tree = self._files()
            for name, data in files.items():
                access.write(tree, name, data)

    @property
    def touched(self) -> bool:
        """Whether anything was run or written, or may have been, since the slot was clean."""
        return self._touched or (bool(self._workspace.trees) and cleanliness.canary_in(self._folder) is None)

    def empty(self) -> None:
        """Kill what is left, remove all files, and prove that the slot is clean. Blocking; free when untouched.

        Raises :class:`~sandboxes.isolation.cleanliness.Dirty`, or what else keeps it from being clean; then call it
        again before the slot is used.
        """
        with self._changing:
            if self.touched:
                self._recycle()
                self._touched = False

    def _recycle(self) -> None:
        folder = self._folder
        canary = cleanliness.canary_in(folder)
        self._kill_processes()
        cleanliness.require_closed(folder)
        self._workspace.empty()
        cleanliness.require_empty(folder, canary)
        if self._group is not None:
            try:
                cleanliness.require_bounds(self._group, self._bounds)
            except cleanliness.Dirty:
                self._group.remove()
                self._group = None  # the next one has the right bounds
                raise

    def close(self) -> None:
        """Let go of everything, whether touched or not. Raises as :meth:`empty` does."""
        try:
            self.empty()
            self._workspace.empty()
        finally:
            if self._group is not None:
                self._group.remove()
                self._group = None

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, making folders on its way. Raises ``ToolError`` that says why it cannot be."""
        await asyncio.to_thread(self._at_files, lambda tree: access.write(tree, path, data))

    async def read(self, path: str, limit: int = 1 << 20) -> bytes:
        """Read at most ``limit`` bytes of a file. Raises ``ToolError``."""
        return await asyncio.to_thread(self._at_files, lambda tree: access.read(tree, path, limit))

    async def list(self, path: str = ".", *, depth: int = 1, limit: int = 10_000) -> Sequence[FileEntry]:
        """Entries of a folder, sorted, down to ``depth`` levels and at most ``limit``. Raises ``ToolError``."""
        return await asyncio.to_thread(self._at_files, lambda tree: access.listing(tree, path, depth, limit))

    async def remove(self, path: str) -> None:
        """Remove a file, or a folder with all in it. Raises ``ToolError``."""
        await asyncio.to_thread(self._at_files, lambda tree: access.remove(tree, path))

    async def snapshot(self) -> Snapshot:
        """Keep the files as they are now, until the episode ends. Raises ``SandboxError`` when the room is used up.

        Files are copied one after the other: what commands write meanwhile is in it or is not, file by file.
        """

        def take(stop: threading.Event) -> Snapshot:
            with self._turns.shared():
                self._files()
                return self._workspace.snapshots.take(self._workspace, stop)

        return await interruptible(take)

    async def restore(self, snapshot: Snapshot) -> None:
        """Put the files back as they were in ``snapshot``, this slot's or another's of this host (a fork).

        What runs is ended first. The files are prepared aside and put in place at once; a failure or a cancellation
        before that leaves everything as it is. Raises ``SandboxError`` when the snapshot is gone or does not fit.
        """
        await interruptible(lambda stop: self._restore(snapshot, stop))

    def _restore(self, snapshot: Snapshot, stop: threading.Event) -> None:
        with self._turns.shared():
            self._files()
        files = self._workspace
        staged = files.stage(self._profile.disk_bytes, lambda trees: files.snapshots.fill(snapshot, files, trees, stop))
        swapping = False
        try:
            with self._turns.alone(stop):
                if stop.is_set():
                    raise Interrupted
                self._kill_processes()
                swapping = True
                files.swap(staged)
        except BaseException:
            if not swapping:
                staged.discard()
            raise

    async def export_snapshot(self, snapshot: Snapshot, target: BinaryIO) -> None:
        """Write a snapshot as a tar stream, for :meth:`import_snapshot` on another machine."""
        await interruptible(lambda stop: self._workspace.snapshots.export(snapshot, target, stop))

    async def import_snapshot(self, source: BinaryIO) -> Snapshot:
        """Read a tar stream as a snapshot of this episode. Raises ``SandboxError`` for what is not one or too large."""
        self._touched = True
        return await interruptible(
            lambda stop: self._workspace.snapshots.load(source, self._workspace, self._profile.disk_bytes, stop)
        )

    def end_sessions(self) -> None:
        """End what :meth:`start` started. Blocking. Raises ``SandboxError`` when something stays."""
        self._watch.end()
        for session in list(self._sessions):
            session.end()

    def _kill_processes(self) -> None:
        self.end_sessions()
        runs = list(self._runs)
        for run in runs:
            run.end("the files of its slot were replaced or removed")
        confined = self._user is not None and self._profile.isolation is not Isolation.NONE
        awaited = frozenset(run.pid for run in runs)
        cleanliness.end_processes(None if confined else self._workspace.folder, self._user, self._group, awaited)

    def _at_files(self, work: Callable[[Tree], T]) -> T:
        with self._turns.shared():
            return work(self._files())

    def _files(self) -> Tree:
        with self._changing:
            self._prepare_files()
            self._touched = True
        return self._workspace.tree

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> ExecResult:
        """Run ``argv`` isolated, in the workspace. Raises ``IsolationError`` when the level cannot be had.

        Raises ``ToolError`` for words of which no command can be made.
        """
        limit = min(seconds, self._profile.exec_seconds) if seconds else self._profile.exec_seconds
        async with self._turns.entered():
            await self._about_to_run(argv, env)
            started = time.monotonic()
            gate = self._gate()
            run = await self._started(argv, env, limit, gate)
            self._runs.add(run)
        try:
            timed_out = await run.finish(stdin, limit, self._excess(gate))
        finally:
            try:
                await to_the_end(run.kill())
            finally:
                self._runs.discard(run)
        return run.result(timed_out=timed_out, seconds=time.monotonic() - started)

    async def start(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, apart: bool = False) -> Session:
        """Start ``argv`` isolated as :meth:`exec` does and leave it running. Raises ``IsolationError``.

        ``apart``: its errors are not joined with its output, but read with ``read_errors``.
        """
        for ended in [each for each in list(self._sessions) if each.exit_code is not None]:
            self._sessions.discard(ended)
        async with self._turns.entered():
            await self._about_to_run(argv, env)
            gate = self._gate()
            session = Session(
                gate=gate,
                write_seconds=self._profile.exec_seconds,
                ended=self._sessions.discard,
            )
            line = self._line(argv, env, gate, EPISODE_SECONDS)
            session.spawn(line, cwd=str(self._workspace.path), env=None if gate is None else OUTSIDE, apart=apart)
            self._sessions.add(session)
        try:
            await session.open_gate()
            excess = self._excess(gate)
            if excess is not None:
                self._watch.add(session, excess)
        except BaseException:
            session.kill()
            await to_the_end(asyncio.to_thread(session.end))
            raise
        return session

    async def _about_to_run(self, argv: Sequence[str], env: Mapping[str, str] | None) -> None:
        require_words(argv, env)
        if self._group is None or not self._workspace.bounded:
            await asyncio.to_thread(self.prepare)
        self._touched = True

    def _gate(self) -> Gate | None:
        if self._profile.isolation is Isolation.NONE:
            return None
        controls = self.controls
        return Gate(
            self._group.join_files if self._group is not None else (),
            processes=self._granted.pids if self._user is None and "pids" not in controls else None,
            memory_counted="memory" in controls,
        )

    def _line(
        self, argv: Sequence[str], env: Mapping[str, str] | None, gate: Gate | None, seconds: float
    ) -> Sequence[str]:
        try:
            return command_line(
                argv,
                workspace=self._workspace,
                profile=self._profile,
                controls=self.controls,
                env=env,
                user=self._user,
                seconds=seconds,
                gate=gate,
            )
        except BaseException:
            if gate is not None:
                gate.started()
                gate.drop()
            raise

    async def _started(
        self, argv: Sequence[str], env: Mapping[str, str] | None, seconds: float, gate: Gate | None
    ) -> Run:
        """Cancelled, it leaves nothing that it started."""
        blamed = partial(own_doing, crowded=bool(self._sessions or self._runs), layered=self._workspace.layered)
        starting = asyncio.ensure_future(self._start(self._line(argv, env, gate, seconds), gate))
        try:
            process = await to_the_end(starting)
        except asyncio.CancelledError:
            if not starting.cancelled() and starting.exception() is None:
                await to_the_end(Run(starting.result(), self._profile.output_bytes, gate).kill())
            raise
        return Run(process, self._profile.output_bytes, gate, blamed)

    async def _start(self, line: Sequence[str], gate: Gate | None) -> asyncio.subprocess.Process:
        try:
            process = await asyncio.create_subprocess_exec(
                *line,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                pass_fds=gate.child_fds if gate is not None else (),
                cwd=self._workspace.path,
                env=None if gate is None else OUTSIDE,
            )
        except BaseException:
            if gate is not None:
                gate.drop()
            raise
        finally:
            if gate is not None:
                gate.started()
        return process

    def _excess(self, gate: Gate | None) -> Callable[[], bool] | None:
        """Asks, blocking, whether a running command takes more than it should; None when the kernel sees to that."""
        controls = self.controls
        disk = "disk" not in controls
        memory = gate is not None and "memory" not in controls
        if not disk and not memory:
            return None

        def exceeded() -> bool:
            if disk and self._workspace.usage() > self._profile.disk_bytes:
                return True
            pid = gate.pid if gate is not None else None
            return memory and pid is not None and exceeds(pid, self._granted.memory_bytes)

        return exceeded


@cache
def _say_once(controls: frozenset[str]) -> None:
    weak = {"memory", "pids", "cpu", "disk"} - controls
    note = f"; only per process or by watching: {', '.join(sorted(weak))}" if weak else ""
    log.info("sandboxed commands are bounded as a whole in: %s%s", ", ".join(sorted(controls)) or "nothing", note)


def slot_sandbox(ground: Path, slot: int, profile: SandboxProfile, surroundings: Surroundings = MACHINE) -> SlotSandbox:
    """The sandbox of one slot on its own, with its workspace in ``ground`` (:func:`mounts.own_ground`)."""
    user = sandbox_user(slot)
    return SlotSandbox(f"{slot}-0", Workspace(ground / f"slot-{slot}", user, surroundings), profile, user, surroundings)
