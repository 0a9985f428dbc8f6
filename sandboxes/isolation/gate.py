"""Holds a command at its start until it is in its control groups, and knows when the last of its processes is gone.

Joining a control group waits for other processors (an RCU grace period, milliseconds on a busy machine); done from
outside, it takes place while bubblewrap builds the namespaces. Nothing of the command runs before: bubblewrap itself
waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import msgspec

from envfarm.core.errors import SandboxError
from sandboxes.isolation.limits import bound_processes_below
from sandboxes.isolation.seccomp import open_filter

_EMPTY_SECONDS = 2.0
_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class _Said(msgspec.Struct, rename="kebab"):
    """One line of what bubblewrap tells."""

    child_pid: int | None = None
    exit_code: int | None = None


class Gate:
    """What bubblewrap inherits: a pipe to tell us things, one to wait for our byte, and the system call filter.

    ``join_files``: of the control groups to join; ``processes``: how many it may have, if nothing else bounds it.
    """

    def __init__(self, join_files: Sequence[str], *, processes: int | None, memory_counted: bool) -> None:
        _adopt_orphans()
        self._join_files = join_files
        self._processes = processes
        self._filter = open_filter(memory_counted=memory_counted)
        self._told, self._tell = os.pipe()
        self._wait, self._go = os.pipe()
        self._said = b""
        self._lock = threading.Lock()  # a thread that opens it may outlive the wait for it
        self._first: int | None = None  # pidfd of the namespace's first process
        self.opened = False
        self.pid: int | None = None
        """The namespace's first process, seen from here; all others are its descendants."""

    @property
    def words(self) -> list[str]:
        """Options for bubblewrap."""
        return [*self.unfiltered, "--seccomp", str(self._filter)]

    @property
    def unfiltered(self) -> list[str]:
        """The same without the filter, for what filters its calls itself."""
        return ["--json-status-fd", str(self._tell), "--block-fd", str(self._wait)]

    @property
    def child_fds(self) -> tuple[int, ...]:
        """Descriptors that bubblewrap must inherit."""
        return self._tell, self._wait, self._filter

    def started(self) -> None:
        """The child has its ends (or will never be): close ours of them."""
        for fd in self.child_fds:
            os.close(fd)

    def drop(self) -> None:
        """Close what is ours. Once: when there is no child, or when all is over."""
        with self._lock:
            for fd in (self._told, self._go, self._first):
                if fd is not None and fd >= 0:
                    os.close(fd)
            self._told = self._go = -1
            self._first = None

    async def open(self) -> None:
        """Put the bounds on the command and let it go. Raises :class:`SandboxError`; then it never runs."""
        await asyncio.to_thread(self._locked_open)

    def _locked_open(self) -> None:
        with self._lock:
            if self._told >= 0:
                self._open()

    def _open(self) -> None:
        while b"\n" not in self._said:
            part = os.read(self._told, 4096)
            if not part:
                return  # bubblewrap ended; its status and its words say why
            self._said += part
        said = msgspec.json.decode(self._said.partition(b"\n")[0], type=_Said)
        if said.child_pid is None:
            raise SandboxError(
                "bubblewrap does not tell the process that it started; it is too old: install 0.6 or later"
            )
        self.pid = said.child_pid
        try:
            self._first = os.pidfd_open(self.pid)
            self._confine(self.pid)
        except ProcessLookupError:
            return
        except OSError as error:
            # First kill, then let go: a pipe that closes opens the gate.
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
            raise SandboxError(f"a command could not be confined: {error}") from error
        with contextlib.suppress(BrokenPipeError):
            os.write(self._go, b"x")
            self.opened = True

    def _confine(self, pid: int) -> None:
        for file in self._join_files:
            Path(file).write_text(str(pid))
        if self._processes is not None:
            bound_processes_below(pid, self._processes)

    def executed(self) -> bool:
        """Whether the command itself was started; to be asked when bubblewrap has ended by itself."""
        with self._lock:  # whoever opens it is at its end, since bubblewrap is
            self._read_rest()
            return any(said.exit_code is not None for said in self._lines())

    def _read_rest(self) -> None:
        os.set_blocking(self._told, False)
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._told, 4096):
                self._said += part

    def _lines(self) -> Iterator[_Said]:
        for line in self._said.splitlines():
            with contextlib.suppress(msgspec.DecodeError):  # bubblewrap was killed while it wrote
                yield msgspec.json.decode(line, type=_Said)

    def find_first(self) -> int | None:
        """A descriptor (pidfd) of the namespace's first process; whoever asks closes it.

        To be called when bubblewrap has ended. ``None`` when there was none, or bubblewrap buried it itself.
        """
        with self._lock:
            if self._first is None and self._told >= 0:
                self._read_rest()
                pid = next((said.child_pid for said in self._lines() if said.child_pid is not None), None)
                if pid is not None and _is_child(pid):
                    with contextlib.suppress(ProcessLookupError):
                        self._first = os.pidfd_open(pid)
            return os.dup(self._first) if self._first is not None else None

    async def emptied(self) -> None:
        """Wait until no process of the command is left. Raises :class:`SandboxError` when some stay.

        To be called when bubblewrap has ended.
        """
        first = self.find_first()
        if first is None:
            return
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(first, gone.set)
        try:
            async with asyncio.timeout(_EMPTY_SECONDS):
                await gone.wait()
        except TimeoutError:
            raise SandboxError(f"processes of a command outlive it by {_EMPTY_SECONDS:.0f} s") from None
        else:
            _bury(first)
        finally:
            loop.remove_reader(first)
            os.close(first)


@cache
def _adopt_orphans() -> None:
    """Become the one who buries a namespace's first process when bubblewrap ended before it.

    Dead processes count in their control group until they are buried, and not everyone's process 1 buries soon.
    """
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _is_child(pid: int) -> bool:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
    except OSError:
        return False


def buried(group: int) -> bool:
    """Bury dead children of ours in a process group; whether none is left in it, dead or alive."""
    try:
        while os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG) is not None:
            pass
    except ChildProcessError:
        return True
    return False


def _bury(pidfd: int) -> None:
    with contextlib.suppress(ChildProcessError):  # bubblewrap did
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
