"""The snapshots of a host: copies of slots' files, bounded in number and in bytes. Blocking.

A snapshot belongs to the episode that took it and is dropped when that ends, with its files. Forks that were made of it
live on: restoring copies. Where this process may mount, each lies in a tmpfs of its own, so that the kernel bounds it
and dropping it takes no time; elsewhere in a folder, and shares blocks with the slot where the file system can.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from envfarm.core.errors import SandboxError
from envfarm.core.sandbox import Snapshot
from sandboxes.isolation import mounts
from sandboxes.isolation.files import archive, archive_reader
from sandboxes.isolation.files.copying import TreeCopy
from sandboxes.isolation.files.removal import empty_folder

log = logging.getLogger(__name__)
ROOM_BYTES = 1 << 30
COUNT = 256
_SLACK = 1 << 20  # for what is written while it is copied


class SlotFiles(Protocol):
    """The files of a slot, as far as a snapshot has to know them (see :mod:`sandboxes.isolation.files.workspace`)."""

    name: str
    owner: int | None

    @property
    def image(self) -> str:
        """Name of the image above whose files the trees lie; empty without one."""

    @property
    def trees(self) -> Mapping[str, Path]:
        """Folders that hold all that was written, by name."""

    def usage(self) -> int:
        """Bytes that they take."""


class Kept(msgspec.Struct, kw_only=True):
    """A snapshot that is kept here."""

    id: str
    folder: Path
    holder: str  # the slot whose episode it belongs to
    owner: int | None  # whose files are the slot's user's
    image: str
    reserved: int  # bytes
    mounted: bool = False
    ready: bool = False


class SnapshotStore:
    """Keeps at most ``count`` snapshots, of ``room_bytes`` bytes in all, in folders of ``ground``."""

    def __init__(self, ground: Path, *, room_bytes: int = ROOM_BYTES, count: int = COUNT) -> None:
        self._ground = ground
        self._room_bytes = room_bytes
        self._count = count
        self._lock = threading.Lock()
        self._kept: dict[str, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, files: SlotFiles, stop: threading.Event) -> Snapshot:
        """Copy the files of a slot. Raises :class:`SandboxError` when the room is used up."""
        used = files.usage()
        with self._new(files, used + max(_SLACK, used // 8)) as kept:
            copy = TreeCopy(stop=stop, room=None if kept.mounted else kept.reserved)
            for name, tree in files.trees.items():
                (kept.folder / name).mkdir()
                copy.tree(tree, kept.folder / name)
        return Snapshot(id=kept.id, files=copy.files, size=copy.size)

    def fill(self, snapshot: Snapshot, files: SlotFiles, trees: Mapping[str, Path], stop: threading.Event) -> None:
        """Copy a snapshot into the empty ``trees`` of ``files``. Raises :class:`SandboxError`."""
        kept = self._of(snapshot, files.image)
        have = {path.name for path in kept.folder.iterdir()}
        if have != set(trees):
            raise SandboxError(f"snapshot {kept.id} holds {sorted(have)} and this slot has {sorted(trees)}")
        copy = TreeCopy(stop=stop, owners=(kept.owner, files.owner))
        for name, tree in trees.items():
            with _no_room(f"snapshot {kept.id} is larger than the slot's disk; give the profile more disk_bytes"):
                copy.tree(kept.folder / name, tree)

    def export(self, snapshot: Snapshot, target: BinaryIO, stop: threading.Event) -> None:
        """Write a snapshot as a tar stream."""
        kept = self._of(snapshot, None)
        head = archive.Head(image=kept.image, trees=sorted(path.name for path in kept.folder.iterdir()))
        archive.write(kept.folder, head, target, owner=kept.owner, stop=stop)

    def load(self, source: BinaryIO, files: SlotFiles, room: int, stop: threading.Event) -> Snapshot:
        """Read a tar stream of at most ``room`` bytes of files as a snapshot of a slot's episode.

        Raises :class:`SandboxError`.
        """
        with self._new(files, room + _SLACK) as kept:
            head, count, size = archive_reader.read(source, kept.folder, owner=files.owner, room=room, stop=stop)
            if head.image != files.image:
                raise SandboxError(f"this archive was made above image {head.image!r}; here it is {files.image!r}")
            with self._lock:
                kept.reserved = min(kept.reserved, size + _SLACK)
        return Snapshot(id=kept.id, files=count, size=size)

    def drop_of(self, holder: str) -> None:
        """Drop the snapshots that belong to the episode of slot ``holder``."""
        with self._lock:
            mine = [kept for kept in self._kept.values() if kept.holder == holder]
        for kept in mine:
            self._drop(kept)

    def _of(self, snapshot: Snapshot, image: str | None) -> Kept:
        kept = self._kept.get(snapshot.id)
        if kept is None or not kept.ready:
            raise SandboxError(
                f"snapshot {snapshot.id} is not kept here (any more): it is dropped when the episode that took it ends"
            )
        if image is not None and kept.image != image:
            raise SandboxError(f"snapshot {kept.id} lies above image {kept.image!r}, this slot above {image!r}")
        return kept

    def _room_left(self) -> int:
        return self._room_bytes - sum(kept.reserved for kept in self._kept.values())

    @contextlib.contextmanager
    def _new(self, files: SlotFiles, room: int) -> Iterator[Kept]:
        """A place that is kept when the block succeeds, and gone when it fails."""
        kept = self._reserve(files, room)
        try:
            kept.folder.mkdir(mode=0o700)
            kept.mounted = mounts.private() and mounts.tmpfs(kept.folder, kept.reserved, owner=os.geteuid())
            with _no_room(f"the files of {files.name} grew too fast to be kept, or the host's disk is full"):
                yield kept
        except BaseException:
            self._drop(kept)
            raise
        if kept.mounted:
            with self._lock:
                kept.reserved = mounts.used_bytes(kept.folder)
        kept.ready = True

    def _reserve(self, files: SlotFiles, room: int) -> Kept:
        with self._lock:
            if len(self._kept) >= self._count:
                raise SandboxError(f"this host keeps {self._count} snapshots already; end the episodes that took them")
            left = self._room_left()
            if room > left or room <= 0:
                raise SandboxError(
                    f"this host has {left} bytes left for snapshots and {room} are needed; "
                    "end episodes that took some, or keep fewer files"
                )
            name = secrets.token_hex(8)
            kept = self._kept[name] = Kept(
                id=name,
                folder=self._ground / f"snapshot-{name}",
                holder=files.name,
                owner=files.owner,
                image=files.image,
                reserved=room,
            )
            return kept

    def _drop(self, kept: Kept) -> None:
        try:
            if kept.mounted:
                mounts.unmount(kept.folder)
            elif kept.folder.exists():
                empty_folder(kept.folder)
            kept.folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("snapshot %s cannot be removed: %s", kept.id, error)
            return  # its room stays taken
        with self._lock:
            self._kept.pop(kept.id, None)


@contextlib.contextmanager
def _no_room(message: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise SandboxError(message if full else f"files cannot be copied: {error}") from error
