"""Where a slot's files lie: one folder with everything that its commands can write, bounded as a whole.

Where this process may mount, the folder is a tmpfs of the profile's size that is thrown away at once; elsewhere it is a
plain folder. In it::

    workspace/   /workspace of the commands      (upper-workspace/ beneath, when the image has files there)
    tmp/         /tmp of the commands
    shm/         /dev/shm of the commands, which no snapshot keeps
    root/        / of the commands, when there is an image: an overlay of the image and upper-root/

``workspace`` and ``tmp`` lie outside of ``root``, where nothing that runs inside can put a link in their place.
"""

from __future__ import annotations

import contextlib
import logging
import os
from functools import cache
from pathlib import Path

from envfarm.core.errors import SandboxError
from sandboxes.isolation import mounts
from sandboxes.isolation.files.descriptors import by_force
from sandboxes.isolation.files.descriptors import folder as opened
from sandboxes.isolation.files.ownership import belonging_to
from sandboxes.isolation.files.removal import empty_folder

log = logging.getLogger(__name__)
TOO_DEEP = 1 << 62
_ENTRY_BYTES = 4096
_MAX_DEPTH = 128
MOUNT_POINTS = ("dev", "proc", "sys", "tmp", "workspace")  # of bubblewrap, in the root


class Area:
    """One incarnation of a slot's files. Blocking."""

    def __init__(self, folder: Path, owner: int | None, image: Path | None) -> None:
        self.folder = folder
        self._owner = owner
        self._image = image
        self.mounted_bytes = 0
        self.layers: dict[str, Path] = {}  # name in the folder, what lies beneath

    @property
    def trees(self) -> dict[str, Path]:
        """Folders that hold all that was written, by name."""
        plain = {name: self.folder / name for name in ("workspace", "tmp") if name not in self.layers}
        return plain | {f"upper-{name}": self.folder / f"upper-{name}" for name in self.layers}

    def make(self, disk_bytes: int) -> None:
        """Make the empty folders, with that much room in all; layers are mounted by :meth:`mount_layers`."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Model-written code runs as the owner: it may pass here, and change nothing.
        mode, group = (0o700, os.getegid()) if self._owner is None else (0o710, self._owner)
        if mounts.private() and mounts.tmpfs(self.folder, disk_bytes, mode=mode, owner=os.geteuid(), group=group):
            self.mounted_bytes = disk_bytes
        elif self._owner is not None:
            os.chown(self.folder, -1, group)
            self.folder.chmod(mode)
        if self._image is not None and self.mounted_bytes and overlay_refusal(self.folder.parent) == "":
            image = self._image
            if self._owner is not None:
                image = belonging_to(self._owner, image, self.folder.parent)
            self.layers["root"] = image
            if _has_files(self._image / "workspace"):
                self.layers["workspace"] = image / "workspace"
        for name in ("workspace", "tmp", "shm", *(f"upper-{name}" for name in self.layers)):
            self._folder(name)

    def mount_layers(self) -> None:
        """Put the layers on what was written above them. Raises :class:`SandboxError`."""
        for name, lower in self.layers.items():
            upper, work, target = (self.folder / f"{kind}{name}" for kind in ("upper-", "work-", ""))
            work.mkdir(mode=0o700)
            target.mkdir(mode=0o755, exist_ok=True)
            if name == "root":
                for point in MOUNT_POINTS:
                    _have_folder(upper / point)
            why = mounts.overlay(lower, upper, work, target)
            if why:
                raise SandboxError(f"the image {lower} cannot be layered under {target}: {why}")

    def throw_away(self) -> None:
        """Remove everything. Raises :class:`SandboxError` when something stays."""
        if self.mounted_bytes:
            if not mounts.unmount(self.folder):  # with the layers in it
                raise SandboxError(f"{self.folder} cannot be unmounted")
            self.mounted_bytes = 0
        else:
            try:
                empty_folder(self.folder)
            except OSError as error:
                raise SandboxError(f"{self.folder} cannot be emptied: {error}") from error
        left = os.listdir(self.folder)  # noqa: PTH208 - names are enough
        if left:
            raise SandboxError(f"{self.folder} cannot be emptied: {left[0]!r} stays in it")
        self.layers = {}

    def discard(self) -> None:
        """Remove everything and the folder as well; what cannot be goes with the host's other folders."""
        with contextlib.suppress(OSError, SandboxError):
            self.throw_away()
            self.folder.rmdir()

    def move(self, folder: Path) -> None:
        """Lie elsewhere from now on, in place of an empty folder. Raises :class:`SandboxError`."""
        if self.mounted_bytes:
            folder.mkdir(mode=0o700, exist_ok=True)
            moved = mounts.move(self.folder, folder)
        else:
            moved = _renamed(self.folder, folder)
        if not moved:
            self.discard()
            raise SandboxError(f"{self.folder} cannot be moved to {folder}")
        with contextlib.suppress(OSError):
            self.folder.rmdir()
        self.folder = folder

    def _folder(self, name: str) -> None:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        # As in every system, everybody may write into these two; programs look at that.
        folder.chmod(0o1777 if name in ("tmp", "shm") else 0o755)
        if self._owner is not None:
            os.chown(folder, self._owner, self._owner)


def _have_folder(path: Path) -> None:
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        path.unlink()
    path.mkdir(mode=0o755, exist_ok=True)


def _renamed(source: Path, target: Path) -> bool:
    try:
        source.rename(target)
    except OSError:
        return False
    return True


def used_bytes(path: Path) -> int:
    """Bytes that a plain folder takes; :data:`TOO_DEEP` when it nests deeper than is good for counting."""
    try:
        with opened(path) as folder:
            return _used(folder, 0)
    except FileNotFoundError:
        return 0


def _used(folder: int, depth: int) -> int:
    if depth > _MAX_DEPTH:
        return TOO_DEEP
    total = 0
    with os.scandir(folder) as scan:
        for entry in scan:
            with contextlib.suppress(OSError):
                # An empty file takes an inode, of which a disk has not many more than blocks.
                total += max(entry.stat(follow_symlinks=False).st_blocks * 512, _ENTRY_BYTES)
                if entry.is_dir(follow_symlinks=False):
                    with by_force(entry.name, folder, is_folder=True) as inner:
                        total += _used(inner, depth + 1)
    return total


@cache
def overlay_refusal(ground: Path) -> str:
    """Why no image can be layered in ``ground``; empty when it can. Says so in the log, once."""
    lower, folder = ground / "probe-lower", ground / "probe"
    try:
        for name in (lower, folder):
            name.mkdir()
        why = "no file system of its own"
        if mounts.tmpfs(folder, 1 << 16, owner=os.geteuid()):
            upper, work, target = (folder / name for name in ("upper", "work", "target"))
            for name in (upper, work, target):
                name.mkdir()
            why = mounts.overlay(lower, upper, work, target)
            mounts.unmount(folder)
    finally:
        for name in (lower, folder):
            name.rmdir()
    if why:
        log.warning("the image's files are read-only here: no overlay can be mounted (%s)", why)
    return why


def _has_files(folder: Path) -> bool:
    try:
        return not folder.is_symlink() and any(folder.iterdir())
    except OSError:
        return False
