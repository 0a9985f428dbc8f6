"""The processes of one confined command, seen and killed from outside, wherever they hide.

What lists them is the ``/proc`` of their own process namespace, reached through its first process: everything that
lives in there and nothing else, whatever session, parent or name it gave itself. An entry of it, held open, stands for
that process and no other, so that a number used again hits nobody. Source: proc(5), pidfd_send_signal(2).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

FIRST, COMMAND = 1, 2  # bubblewrap's own process, which takes in orphans, and what it was asked to run
_PAUSE_SECONDS = 0.002
_DEAD = "ZXx"


class Inhabitant(msgspec.Struct, frozen=True):
    """A process as its namespace numbers it, and when it started (clock ticks since boot)."""

    pid: int
    start: int


class _Seen(msgspec.Struct, frozen=True):
    who: Inhabitant
    parent: int
    stopped: bool


class Inhabitants:
    """Of the namespace whose first process is ``first`` here."""

    def __init__(self, first: int) -> None:
        self._first = first

    def others(self) -> frozenset[Inhabitant]:
        """All but the first process and the command. Raises ``LookupError`` when they cannot be seen."""
        with self._proc() as proc:
            return frozenset(seen.who for seen in _seen(proc) if seen.who.pid > COMMAND)

    def signal(self, number: int) -> None:
        """Send the command a signal. Raises ``LookupError`` when it cannot be seen."""
        with self._proc() as proc:
            _send(proc, COMMAND, number)

    def kill_others(self, spare: frozenset[Inhabitant], seconds: float) -> bool:
        """Kill all of :meth:`others` but ``spare`` and what these started; whether none is left. Blocking.

        They are stopped before they are killed: who is stopped starts nobody, so that there is an end to it.
        Raises ``LookupError`` when they cannot be seen.
        """
        deadline = time.monotonic() + seconds
        with self._proc() as proc:
            while time.monotonic() < deadline:
                seen = list(_seen(proc))
                kept = _family(seen, spare)
                doomed = [each for each in seen if each.who.pid > COMMAND and each.who.pid not in kept]
                if not doomed:
                    return True
                running = [each for each in doomed if not each.stopped]
                for each in running or doomed:
                    _send(proc, each.who.pid, signal.SIGSTOP if running else signal.SIGKILL)
                time.sleep(_PAUSE_SECONDS)
        return False

    def open_for_reading(self, descriptor: int) -> int:
        """The other end of the pipe at ``descriptor`` of the command. Raises ``LookupError`` when it cannot be had."""
        with self._proc() as proc:
            try:
                flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
                return os.open(f"{COMMAND}/fd/{descriptor}", flags, dir_fd=proc)
            except OSError as error:
                raise LookupError(str(error)) from error

    @contextlib.contextmanager
    def _proc(self) -> Iterator[int]:
        try:
            proc = os.open(f"/proc/{self._first}/root/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise LookupError(f"what runs in the sandbox cannot be seen: {error}") from error
        try:
            if os.fstat(proc).st_dev == Path("/proc").stat().st_dev:
                raise LookupError("the sandbox is not set up yet")
            yield proc
        finally:
            os.close(proc)


def _seen(proc: int) -> Iterator[_Seen]:
    """The living."""
    for name in os.listdir(proc):
        if name.isdigit() and (seen := _look(proc, name)) is not None:
            yield seen


def _look(proc: int, name: str) -> _Seen | None:
    try:
        fd = os.open(f"{name}/stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            text = os.read(fd, 4096)
        finally:
            os.close(fd)
    except OSError:
        return None  # gone
    fields = text[text.rindex(b")") + 2 :].decode().split()
    state, parent, threads, start = fields[0], int(fields[1]), int(fields[17]), int(fields[19])
    if state in _DEAD and threads <= 1:  # else only its first thread is dead
        return None
    return _Seen(Inhabitant(int(name), start), parent, state in "Tt")


def _family(seen: list[_Seen], heads: frozenset[Inhabitant]) -> set[int]:
    """Numbers of ``heads`` that live and of all that descend from them."""
    family = {each.who.pid for each in seen if each.who in heads}
    while more := {each.who.pid for each in seen if each.parent in family} - family:
        family |= more
    return family


def _send(proc: int, pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        fd = os.open(str(pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
        try:
            signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)
