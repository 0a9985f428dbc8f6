"""The private folder of one slot, and files in it that model-written code may have tampered with.

Where this process may mount (see :mod:`sandboxes.isolation.mounts`), a workspace is a tmpfs of the profile's size that
is thrown away whole. Elsewhere it is a plain folder, bounded by rlimit and by watching.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from envfarm.core.errors import SandboxError, ToolError
from sandboxes.isolation import mounts


class Workspace:
    """A folder with at most ``disk_bytes`` in it. Paths given to it are relative and never followed through links."""

    def __init__(self, path: Path, owner: int | None = None) -> None:
        self.path = path
        self._owner = owner  # of the files; none: whoever this process is
        self._mounted_bytes = 0
        self._used = False

    @property
    def bounded(self) -> bool:
        """Whether the kernel bounds the bytes in it."""
        return self._mounted_bytes > 0

    def prepare(self, disk_bytes: int) -> None:
        """Make the empty folder, with that much room; keeps what is there when nothing has to change."""
        if self._used and (self._mounted_bytes == disk_bytes or not self._mounted_bytes):
            return
        self.empty()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if mounts.private() and mounts.tmpfs(
            self.path, disk_bytes, owner=os.geteuid() if self._owner is None else self._owner
        ):
            self._mounted_bytes = disk_bytes
        elif self._owner is not None:
            os.chown(self.path, self._owner, self._owner)
        self._used = True

    def empty(self) -> None:
        """Remove everything. Raises :class:`SandboxError` when something stays."""
        if not self._used:
            return
        if self._mounted_bytes:
            if not mounts.unmount(self.path):
                raise SandboxError(f"workspace {self.path} cannot be unmounted")
            self._mounted_bytes = 0
        else:
            try:
                _remove_inside(self.path)
            except OSError as error:
                raise SandboxError(f"workspace {self.path} cannot be emptied: {error}") from error
        self._used = False

    def usage(self) -> int:
        """Bytes in it now, as far as they can be counted."""
        total = 0
        for folder, _, names in os.walk(self.path):
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


def _remove_inside(folder: Path) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.path, 0o700)  # noqa: PTH101 - model code may have taken our leave away
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)  # noqa: PTH108 - as above, without a Path per file
