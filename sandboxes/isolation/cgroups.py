"""Control groups for sandboxed commands, version 1 or 2, where this process may make them.

One group per slot. What cannot be had is named in ``missing``; rlimits then stand in (per process instead of per
command). Groups carry the host's process id in their name, so that a later host can clear up after one that died.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import psutil

from envfarm.core.sandbox import SandboxProfile

log = logging.getLogger(__name__)
_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "envfarm-"
_PERIOD_US = 100_000
# An eighth of what others have: a command yields to the host that serves all episodes, and to neighbours that start.
_SHARES, _WEIGHT = "128", "12"
CONTROLS = ("memory", "pids", "cpu")
_BOUNDS = (
    "memory.max",
    "memory.swap.max",
    "memory.oom.group",
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.kmem.tcp.limit_in_bytes",
    "pids.max",
    "cpu.max",
    "cpu.weight",
    "cpu.shares",
    "cpu.cfs_period_us",
    "cpu.cfs_quota_us",
)


class SlotGroup:
    """The group (in version 1: one per controller) that commands of one slot join."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders

    @property
    def controls(self) -> frozenset[str]:
        """Which of ``memory``, ``pids``, ``cpu`` are bounded for the whole of a command."""
        return frozenset(self._folders)

    @property
    def join_files(self) -> list[str]:
        """Files into which a process writes 0 to join."""
        return sorted({str(folder / "cgroup.procs") for folder in self._folders.values()})

    @property
    def member_files(self) -> list[Path]:
        """Files that list the processes inside."""
        return [Path(file) for file in self.join_files]

    def bounds(self) -> dict[str, str]:
        """Every bound as the kernel has it now, by file; groups made below ours count as one."""
        found: dict[str, str] = {}
        for folder in set(self._folders.values()):
            for name in _BOUNDS:
                with contextlib.suppress(OSError):
                    found[f"{folder}/{name}"] = (folder / name).read_text().strip()
            with contextlib.suppress(OSError):
                found[f"{folder}: groups"] = str(folder.stat().st_nlink)
        return found

    def kill(self) -> None:
        """Kill whatever is still inside."""
        for folder in set(self._folders.values()):
            with contextlib.suppress(OSError):
                for pid in (folder / "cgroup.procs").read_text().split():
                    os.kill(int(pid), 9)

    def remove(self) -> None:
        """Remove the group; what cannot be removed now is swept by the next host."""
        for folder in set(self._folders.values()):
            with contextlib.suppress(OSError):
                folder.rmdir()


def make(slot: str, profile: SandboxProfile) -> SlotGroup:
    """A group for ``slot`` with the bounds of ``profile``, as many of them as can be had."""
    name = f"{_PREFIX}{os.getpid()}-{slot}"
    folders: dict[str, Path] = {}
    for control, parent in _parents().items():
        folder = parent / name
        try:
            folder.mkdir(exist_ok=True)
            _bound(folder, control, profile)
        except OSError as error:
            log.info("no %s control group: %s", control, error)
            continue
        folders[control] = folder
    return SlotGroup(folders)


def sweep() -> int:
    """Remove groups whose host is gone; returns how many."""
    removed = 0
    for parent in set(_parents().values()):
        for folder in parent.glob(f"{_PREFIX}*"):
            pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
            if pid.isdigit() and not psutil.pid_exists(int(pid)):
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    removed += 1
    return removed


def _parents() -> dict[str, Path]:
    """Folder under which a group with each control can be made."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    if (_ROOT / "cgroup.controllers").exists():
        return _parents_v2(lines)
    found: dict[str, Path] = {}
    for line in lines:
        _, names, path = line.split(":", 2)
        for control in set(names.split(",")) & set(CONTROLS):
            mount = _ROOT / control
            own = mount / path.lstrip("/")
            parent = own if own.is_dir() else mount
            if os.access(parent, os.W_OK):
                found[control] = parent
    return found


def _parents_v2(lines: list[str]) -> dict[str, Path]:
    own = next((line.partition("::")[2] for line in lines if line.startswith("0::")), "")
    if not own:
        return {}
    parent = _ROOT / own.lstrip("/")
    if parent.name == _leaf():
        parent = parent.parent
    return dict.fromkeys(enabled_below(parent, CONTROLS), parent)


def enabled_below(parent: Path, controls: Sequence[str]) -> list[str]:
    """Those of ``controls`` that groups made in ``parent``, a group of version 2, can have; this process may move.

    A group with processes in it cannot hand controllers down (but the machine's root can). Where we are the only one
    in a group that was delegated to us, we move into a leaf of it; where others are, nothing can be had.
    """
    if not os.access(parent / "cgroup.subtree_control", os.W_OK):
        return []
    _enable(parent, controls)
    if not set(controls) <= set(_words(parent / "cgroup.subtree_control")) and _only_we(parent):
        leaf = parent / _leaf()
        try:
            leaf.mkdir(exist_ok=True)
            (leaf / "cgroup.procs").write_text("0")
        except OSError as error:
            log.info("no leaf for this process: %s", error)
        _enable(parent, controls)
    enabled = _words(parent / "cgroup.subtree_control")
    return [control for control in controls if control in enabled]


def _leaf() -> str:
    return f"{_PREFIX}{os.getpid()}-host"


def _only_we(group: Path) -> bool:
    return _words(group / "cgroup.procs") == [str(os.getpid())]


def _enable(parent: Path, controls: Sequence[str]) -> None:
    for control in controls:
        _optional(parent / "cgroup.subtree_control", f"+{control}")


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _bound(folder: Path, control: str, profile: SandboxProfile) -> None:
    v2 = (folder / "cgroup.controllers").exists()
    quota = max(1000, int(profile.cpus * _PERIOD_US))
    if control == "memory" and v2:
        (folder / "memory.max").write_text(str(profile.memory_bytes))
        _optional(folder / "memory.swap.max", "0")
        _optional(folder / "memory.oom.group", "1")
    elif control == "memory":
        (folder / "memory.limit_in_bytes").write_text(str(profile.memory_bytes))
        _optional(folder / "memory.memsw.limit_in_bytes", str(profile.memory_bytes))
        _optional(folder / "memory.kmem.tcp.limit_in_bytes", str(profile.memory_bytes))  # counted apart
    elif control == "pids":
        (folder / "pids.max").write_text(str(profile.pids))
    elif v2:
        (folder / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        _optional(folder / "cpu.weight", _WEIGHT)
    else:
        _optional(folder / "cpu.shares", _SHARES)
        (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(quota))


def _optional(file: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        file.write_text(text)
