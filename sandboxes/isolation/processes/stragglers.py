"""Processes of a slot that outlived it: found by what they cannot shed, told by name, and killed.

Where the host is root, commands of a slot are a user of its own, and the kernel says in one call whether that user has
any process. Elsewhere a command is known by its slot's folder, which stands in the command line of the bubblewrap that
confines it (and that is the first process of its namespace, so that nothing in there outlives it) or is where a
command without confinement works. Blocking.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

_PROC = Path("/proc")
STAY_SECONDS = 2.0  # a process that was killed while it waited for a disk takes a while
_LOOK_SECONDS = 0.005


class Straggler(msgspec.Struct, frozen=True):
    """One process: its id, and its name for a person."""

    pid: int
    name: str

    def __str__(self) -> str:
        """As a cause shows it."""
        return f"{self.name} (process {self.pid})"


Find = Callable[[], Sequence[Straggler]]


def end(find: Find, awaited: frozenset[int] = frozenset()) -> Sequence[Straggler]:
    """Kill what ``find`` finds until it finds nothing; returns those that stay.

    ``awaited``: children of ours that somebody else waits for and will bury.
    """
    ends = time.monotonic() + STAY_SECONDS
    killed: set[int] = set()
    while (found := find()) or killed:
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
                killed.add(process.pid)
        killed = {pid for pid in killed - awaited if not _buried(pid)}
        if time.monotonic() >= ends:
            return found
        if found or killed:
            time.sleep(_LOOK_SECONDS)
    return ()


def _buried(pid: int) -> bool:
    """Whether nothing is left to us of what we killed: this process adopts orphans, and nobody else waits for them."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None
    except ChildProcessError:
        return True


def of_groups(member_files: Sequence[Path]) -> list[Straggler]:
    """Members of control groups."""
    pids: set[int] = set()
    for file in member_files:
        with contextlib.suppress(OSError):
            pids.update(map(int, file.read_text().split()))
    return [Straggler(pid, _name(pid)) for pid in sorted(pids)]


def of_user(user: int) -> list[Straggler]:
    """Processes of a slot's user, those left out that another host on this machine has started."""
    try:
        os.getpriority(os.PRIO_USER, user)
    except ProcessLookupError:
        return []  # nobody: the usual case, for the price of one call
    processes = {pid: facts for pid in _pids() if (facts := _facts(pid)) is not None}
    found = []
    for pid, (users, _, name) in processes.items():
        if user in users and not _someone_elses(pid, user, processes):
            found.append(Straggler(pid, name))
    return found


def of_folder(folder: Path) -> list[Straggler]:
    """Processes of our own user that were started for the slot in ``folder``, or work in there."""
    below, us = os.fsencode(folder) + b"/", os.geteuid()
    found = []
    for pid in _pids():
        process = _PROC / str(pid)
        try:
            if process.stat().st_uid != us or pid == os.getpid():
                continue
            if below in (process / "cmdline").read_bytes() or bytes((process / "cwd").readlink()).startswith(below):
                found.append(Straggler(pid, _name(pid)))
        except OSError:
            continue  # gone, or out of our sight and so none that we started
    return found


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir(_PROC) if name.isdigit())  # noqa: PTH208 - names are enough


_Facts = tuple[frozenset[int], int, str]  # real, effective and saved user, parent, name


def _facts(pid: int) -> _Facts | None:
    """Read from ``status``: who owns the folder in /proc is not who the process is, once it forbids to look into it.

    None also for one that has ended and waits for process 1 to take note, however long that takes. It has a single
    thread left; one whose first thread alone has ended goes on.
    """
    users: frozenset[int] = frozenset()
    parent, name, ended = 0, "?", False
    try:
        for line in (_PROC / str(pid) / "status").read_text(errors="replace").splitlines():
            key, _, value = line.partition(":\t")
            if key == "Name":
                name = value
            elif key == "PPid":
                parent = int(value)
            elif key == "Uid":
                users = frozenset(map(int, value.split()[:3]))
                if not ended:
                    break  # nothing of interest follows
            elif key == "State":
                ended = value.startswith(("Z", "X"))
            elif key == "Threads" and ended and int(value) <= 1:
                return None
    except OSError:
        return None
    return users, parent, name


def _someone_elses(pid: int, user: int, processes: dict[int, _Facts]) -> bool:
    """Whether a process of ``user`` was started by another than this one, such as another host on this machine.

    That is the first ancestor who is somebody else. An orphan's is the machine's or container's first process.
    """
    while pid in processes and user in processes[pid][0]:
        pid = processes[pid][1]
    return pid not in (os.getpid(), 0, 1)


def _name(pid: int) -> str:
    facts = _facts(pid)
    return facts[2] if facts is not None else "?"
