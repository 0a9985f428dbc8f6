"""The files of one slot as its commands see them: /workspace, /tmp and, with an image, everything else.

Where they lie, and what bounds them, is :mod:`sandboxes.isolation.area`'s matter.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from envfarm.core.errors import ToolError
from sandboxes.isolation.area import Area
from sandboxes.isolation.surroundings import MACHINE, Surroundings

WORKSPACE = "/workspace"


class Workspace:
    """Folders with at most ``disk_bytes`` in all of them. ``folder`` is the slot's own, on the host.

    Commands see :attr:`path` as /workspace, :attr:`tmp` as /tmp and :attr:`root`, if any, as /. The three are separate
    folders: bind each. Attributes are final once :meth:`prepare` has returned.
    """

    def __init__(self, folder: Path, owner: int | None = None, surroundings: Surroundings = MACHINE) -> None:
        self._folder = folder
        self._owner = owner  # of the files; none: whoever this process is
        self._surroundings = surroundings
        self._area: Area | None = None

    @property
    def path(self) -> Path:
        """What commands see as /workspace."""
        return self._folder / "workspace"

    @property
    def tmp(self) -> Path:
        """What commands see as /tmp."""
        return self._folder / "tmp"

    @property
    def root(self) -> Path | None:
        """What commands see as /; ``None`` without an image. With :attr:`layered` it can be written to.

        Then it has the folders dev, proc, sys, tmp and workspace as places for mounts. Without, it is the image's own
        folder, may lack them, and must be bound read-only.
        """
        return self._folder / "root" if self.layered else self._surroundings.root

    @property
    def layered(self) -> bool:
        """Whether changes to the image's files are kept in a layer of the slot's own."""
        return self._area is not None and "root" in self._area.layers

    @property
    def workdir(self) -> str:
        """Folder, as seen inside, in which commands start: the image's, where that can be written to."""
        return (self._surroundings.workdir if self.layered else "") or WORKSPACE

    @property
    def env(self) -> Mapping[str, str]:
        """Variables that the image gives to commands."""
        return self._surroundings.env

    @property
    def bounded(self) -> bool:
        """Whether the kernel bounds the bytes in it."""
        return self._area is not None and self._area.mounted_bytes > 0

    def prepare(self, disk_bytes: int) -> None:
        """Make the empty folders, with that much room; keeps what is there when nothing has to change."""
        area = self._area
        if area is not None and (area.mounted_bytes == disk_bytes or not area.mounted_bytes):
            return
        self.empty()
        area = Area(self._folder, self._owner, self._surroundings.root)
        area.make(disk_bytes)
        area.mount_layers()
        self._area = area

    def empty(self) -> None:
        """Remove everything. Raises :class:`SandboxError` when something stays."""
        if self._area is not None:
            self._area.throw_away()
            self._area = None

    def usage(self) -> int:
        """Bytes in it now, as far as they can be counted."""
        total = 0
        for folder, _, names in os.walk(self._folder):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_blocks * 512  # noqa: PTH118 - a hot loop
        return total

    def fill(self, files: Mapping[str, bytes]) -> None:
        """Write ``files``."""
        for name, data in files.items():
            self.write(name, data)

    def write(self, name: str, data: bytes) -> None:
        """Write one file, making folders on its way. Raises :class:`ToolError` for a path that leads outside."""
        with self._opened(name, os.O_WRONLY | os.O_CREAT, make_folders=True) as fd:
            os.ftruncate(fd, 0)
            self._give(fd)
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]

    def read(self, name: str, limit: int) -> bytes:
        """At most ``limit`` bytes of one file. Raises :class:`ToolError` for a path that leads outside or nowhere."""
        with self._opened(name, os.O_RDONLY, make_folders=False) as fd:
            parts, left = [], limit
            while left > 0 and (part := os.read(fd, min(left, 1 << 20))):
                parts.append(part)
                left -= len(part)
            return b"".join(parts)

    @contextlib.contextmanager
    def _opened(self, name: str, flags: int, *, make_folders: bool) -> Iterator[int]:
        """Descriptor of a regular file, reached without following a link at any place of the path."""
        parts = _parts(name)
        with contextlib.ExitStack() as stack:
            here = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, here)
            try:
                for part in parts[:-1]:
                    made = make_folders and _made_folder(part, here)
                    here = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
                    stack.callback(os.close, here)
                    if made:
                        self._give(here)
                # Non-blocking: a named pipe in the place of the file must not hold us.
                fd = os.open(parts[-1], flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644, dir_fd=here)
                stack.callback(os.close, fd)
            except OSError as error:
                raise ToolError(f"{name}: {error.strerror} (links are not followed)") from None
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ToolError(f"{name}: not a regular file")
            yield fd

    def _give(self, fd: int) -> None:
        if self._owner is not None:
            os.fchown(fd, self._owner, self._owner)


def _made_folder(name: str, parent: int) -> bool:
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
    except FileExistsError:
        return False
    return True


def _parts(name: str) -> tuple[str, ...]:
    path = PurePosixPath(name)
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts or not path.parts:
        raise ToolError(f"{name!r}: give a path inside the workspace, relative and without '..'")
    return path.parts
