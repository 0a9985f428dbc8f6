"""Proof that nothing of an episode is left in its slot: no process, no file, no mount, no open file, no changed bound.

A *canary*, a file with a random name, is put beside the files of every slot that has any, out of its commands' sight.
The files of an episode are removed as one, so a canary that is still there says that nothing was removed at all.
Everything here blocks for a millisecond or so, and longer only where something is wrong.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from envfarm.core.errors import SandboxError
from sandboxes.isolation.cgroups import SlotGroup
from sandboxes.isolation.processes import stragglers

_CANARY = ".canary-"
_SHOWN = 3  # of many, in a cause


class Dirty(SandboxError):
    """Something of an episode is left in its slot. The message says what."""


def lay_canary(folder: Path) -> None:
    """Put a canary into a slot's folder."""
    (folder / f"{_CANARY}{secrets.token_hex(8)}").touch(mode=0o600)


def canary_in(folder: Path) -> str | None:
    """Name of the canary in a slot's folder."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names are enough
    except FileNotFoundError:
        return None
    return next((name for name in names if name.startswith(_CANARY)), None)


def end_processes(
    folder: Path | None, user: int | None, group: SlotGroup | None, awaited: frozenset[int] = frozenset()
) -> None:
    """Kill whatever of a slot is still there. Raises :class:`Dirty` when it does not end.

    ``user``: of the slot, who has no other processes. ``folder``: of the slot, when its processes may be ours as well.
    ``awaited``: children of ours that somebody waits for.
    """
    finds: list[stragglers.Find] = []
    if group is not None:
        finds.append(lambda: stragglers.of_groups(group.member_files))
    if user is not None:
        finds.append(lambda: stragglers.of_user(user))
    if folder is not None:
        finds.append(lambda: stragglers.of_folder(folder))
    for find in finds:
        left = stragglers.end(find, awaited)
        if left:
            raise Dirty(f"processes do not end: {_listed(left)}")


def require_closed(folder: Path) -> None:
    """Raises :class:`Dirty` when this process has a file of the slot open, which would keep all of them alive."""
    below = f"{folder}/"
    held = []
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are enough
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - the text, not a path
            if target.startswith(below):
                held.append(target.removeprefix(below))
    if held:
        raise Dirty(f"files are held open: {_listed(sorted(held))}")


def require_empty(folder: Path, canary: str | None) -> None:
    """Raises :class:`Dirty` unless ``folder`` is an empty one without anything mounted on it, or is gone."""
    try:
        left = os.listdir(folder)  # noqa: PTH208 - names are enough
    except FileNotFoundError:
        return
    if canary in left:
        raise Dirty(f"files were not removed: the canary is still in {folder}")
    if left:
        raise Dirty(f"files are left in {folder}: {_listed(sorted(left))}")
    if _mount_of(folder) != _mount_of(folder.parent):  # below an empty folder nothing else can be mounted
        raise Dirty(f"something is still mounted on {folder}")


def require_bounds(group: SlotGroup, at_start: dict[str, str]) -> None:
    """Raises :class:`Dirty` when control groups do not bound the slot as they did."""
    now = group.bounds()
    changed = [
        f"{Path(name).name} is {now.get(name, 'gone')}, not {value}"
        for name, value in at_start.items()
        if now.get(name) != value
    ]
    if changed:
        raise Dirty(f"bounds have changed: {_listed(changed)}")


def _mount_of(folder: Path) -> int:
    """Id of the mount that a folder lies on; unlike the device, it tells a bind mount from what it shows."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    finally:
        os.close(fd)
    return next(int(line.partition(":")[2]) for line in lines if line.startswith("mnt_id:"))


def _listed(things: Sequence[object]) -> str:
    more = f" and {len(things) - _SHOWN} more" if len(things) > _SHOWN else ""
    return ", ".join(map(str, things[:_SHOWN])) + more
