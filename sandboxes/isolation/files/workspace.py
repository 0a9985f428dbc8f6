"""The files of one slot as its commands see them: /workspace, /tmp and, with an image, everything else.

Where they lie, and what bounds them, is :mod:`sandboxes.isolation.files.area`'s matter.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from envfarm.core.errors import SandboxError, ToolError
from sandboxes.isolation import mounts
from sandboxes.isolation.files import access
from sandboxes.isolation.files.area import Area, used_bytes
from sandboxes.isolation.files.paths import Tree
from sandboxes.isolation.files.snapshots import SnapshotStore
from sandboxes.isolation.surroundings import MACHINE, Surroundings

WORKSPACE = "/workspace"


class Workspace:
    """Folders with at most ``disk_bytes`` in all of them. ``folder`` is the slot's own, on the host.

    Commands see :attr:`path` as /workspace, :attr:`tmp` as /tmp and :attr:`root`, if any, as /. The three are separate
    folders: bind each. Attributes are final once :meth:`prepare` has returned.
    """

    def __init__(
        self,
        folder: Path,
        owner: int | None = None,
        surroundings: Surroundings = MACHINE,
        snapshots: SnapshotStore | None = None,
    ) -> None:
        self.name = folder.name
        self.owner = owner  # of the files; none: whoever this process is
        self.snapshots = SnapshotStore(folder.parent) if snapshots is None else snapshots
        self.folder = folder
        self._surroundings = surroundings
        self._area: Area | None = None
        self._changing = threading.RLock()

    @property
    def path(self) -> Path:
        """What commands see as /workspace."""
        return self.folder / "workspace"

    @property
    def tmp(self) -> Path:
        """What commands see as /tmp."""
        return self.folder / "tmp"

    @property
    def shm(self) -> Path:
        """What commands see as /dev/shm."""
        return self.folder / "shm"

    @property
    def root(self) -> Path | None:
        """What commands see as /; ``None`` without an image. With :attr:`layered` it can be written to.

        Then it has the folders dev, proc, sys, tmp and workspace as places for mounts. Without, it is the image's own
        folder, may lack them, and must be bound read-only.
        """
        return self.folder / "root" if self.layered else self._surroundings.root

    @property
    def layered(self) -> bool:
        """Whether changes to the image's files are kept in a layer of the slot's own."""
        return self._area is not None and "root" in self._area.layers

    @property
    def workdir(self) -> str:
        """Folder, as seen inside, in which commands start: the image's, where that can be written to."""
        return (self._surroundings.workdir if self.layered else "") or WORKSPACE

    @property
    def image(self) -> str:
        """Name of the image above whose files the trees lie; empty when none of it was changed."""
        return self._surroundings.image if self.layered else ""

    @property
    def env(self) -> Mapping[str, str]:
        """Variables that the image gives to commands."""
        return self._surroundings.env

    @property
    def present(self) -> bool:
        """Whether the folders have been made."""
        return self._area is not None

    @property
    def bounded(self) -> bool:
        """Whether the kernel bounds the bytes in it."""
        return self._area is not None and self._area.mounted_bytes > 0

    def prepare(self, disk_bytes: int) -> None:
        """Make the empty folders, with that much room; keeps what is there when nothing has to change."""
        area = self._area
        if area is not None and (area.mounted_bytes == disk_bytes or not area.mounted_bytes):
            return
        with self._changing:
            if self._area is area:
                self.empty()
                self._area = self._fresh(self.folder, disk_bytes)
                self._make_workdir()

    def empty(self) -> None:
        """Remove everything. Raises :class:`SandboxError` when something stays."""
        with self._changing:
            if self._area is not None:
                self._area.throw_away()
                self._area = None
            self.snapshots.drop_of(self.name)

    def stage(self, disk_bytes: int, fill: Callable[[Mapping[str, Path]], None]) -> Area:
        """Other files for this slot, beside the present ones: ``fill`` writes into the folders of :attr:`trees`."""
        folder = self.folder.with_name(f"{self.folder.name}-{secrets.token_hex(4)}")
        return self._fresh(folder, disk_bytes, fill)

    def swap(self, staged: Area) -> None:
        """Put staged files in the place of the present ones, which are gone. Raises :class:`SandboxError`."""
        with self._changing:
            if self._area is not None:
                self._area.throw_away()
                self._area = None
            staged.move(self.folder)
            self._area = staged
            self._make_workdir()

    @property
    def trees(self) -> Mapping[str, Path]:
        """Folders on the host that hold all that was written, by name."""
        return self._area.trees if self._area is not None else {}

    def usage(self) -> int:
        """Bytes in it now; without limit when it nests too deep to be counted."""
        area = self._area
        if area is None:
            return 0
        if area.mounted_bytes:
            return mounts.used_bytes(self.folder)
        return used_bytes(self.folder)

    def _fresh(self, folder: Path, disk_bytes: int, fill: Callable[[Mapping[str, Path]], None] | None = None) -> Area:
        area = Area(folder, self.owner, self._surroundings.root)
        try:
            area.make(disk_bytes)
            if fill is not None:
                fill(area.trees)
            area.mount_layers()
        except BaseException:
            area.discard()
            raise
        return area

    def _make_workdir(self) -> None:
        if self.workdir != WORKSPACE:
            try:
                access.make_folder(self.tree, self.workdir)
            except ToolError as error:
                self.empty()
                raise SandboxError(f"the image's working folder cannot be had: {error}") from error

    @property
    def tree(self) -> Tree:
        """The files as :mod:`sandboxes.isolation.files.access` finds them."""
        places = {"workspace": self.path, "tmp": self.tmp}
        return Tree(root=self.root, places=places, workdir=self.workdir, owner=self.owner)
