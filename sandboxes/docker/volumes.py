"""The files of images, each in a volume of the engine that hosts mount read-only: any image works, unchanged.

Why a volume and not a mount of the image itself (Docker 28): in a host without privileges, files that only root may
read would be lost, and no file could be changed by the commands that see them. Filling a volume rewrites the owner.

A volume is filled by streaming the export of a container that never starts into another one that never starts. It is
complete once it has the file :data:`MARKER`; a filling that broke off is thrown away. The name of the second container
is the lock between gateways of one engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from docker import APIClient
from docker.errors import APIError, NotFound

from envfarm.core.errors import SandboxError
from sandboxes.docker import rewriting
from sandboxes.docker.container import IMAGE
from sandboxes.docker.engine import Engine
from sandboxes.docker.errors import DockerError
from sandboxes.docker.folders import held
from sandboxes.docker.images import Image
from sandboxes.docker.labels import FILLER_KIND, KIND, OWNER, STATE, VOLUME_KIND
from sandboxes.docker.sweeping import discard

log = logging.getLogger(__name__)
FILL_SECONDS = 1800.0
KEPT = 8
ROOT = "root"
MARKER = "image.json"
_PLACES = [
    f"{ROOT}/{name}" for name in ("dev", "proc", "sys", "tmp", "workspace")
]  # for mounts; an image may lack them
_ID = "envfarm.image.id"
_NAME = "envfarm.image.name"
_POLL_SECONDS = 0.5
_NEVER_RUN = ["envfarm-never-runs-this"]


class ImageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in :data:`MARKER`, beside the folder :data:`ROOT`: what the image sets for its commands."""

    name: str
    id: str
    env: tuple[str, ...]
    workdir: str


def root() -> str:
    """Where a host finds the files of its image."""
    return f"{IMAGE}/{ROOT}"


class ImageVolumes:
    """Volumes by image. Concurrent callers of one image wait for one filling."""

    def __init__(self, engine: Engine, owner: str, state: Path, user: int, *, kept: int = KEPT) -> None:
        self._engine = engine
        self._owner = owner
        self._state = state
        self._user = user
        self._kept = kept
        self._ready: set[str] = set()
        self._locks: dict[str, asyncio.Lock] = {}

    async def get(self, image: Image) -> str:
        """Name of the volume with the files of ``image``. Raises the farm's errors."""
        name = f"envfarm-image-{image.id.removeprefix('sha256:')[:32]}-{self._user}"
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name in self._ready and await self._engine.call("looking for a volume", lambda c: _exists(c, name)):
                return name
            self._ready.discard(name)
            try:
                async with asyncio.timeout(FILL_SECONDS):
                    await self._fill(image, name)
            except TimeoutError:
                raise DockerError(
                    f"image {image.name!r} could not be unpacked within {FILL_SECONDS:g} s: see docker ps --all "
                    f"--filter label={KIND}={FILLER_KIND}, and whether the engine's disk is slow"
                ) from None
            self._ready.add(name)
        await self._tidy()
        return name

    async def _fill(self, image: Image, volume: str) -> None:
        while True:
            if await self._filled(image, volume):
                return
            await asyncio.sleep(_POLL_SECONDS)  # another gateway is at it

    async def _filled(self, image: Image, volume: str) -> bool:
        stop = threading.Event()  # set by a caller that gives up
        labels = {OWNER: self._owner, KIND: FILLER_KIND, STATE: str(self._state)}
        filling = _Filling(image, volume, self._user, labels, stop)
        return await self._engine.call(f"unpacking image {image.name!r}", filling.run, FILL_SECONDS, give_up=stop.set)

    async def _tidy(self) -> None:
        """Remove volumes beyond the newest that no container uses. What cannot be removed stays."""
        try:
            await self._engine.call("removing old volumes", lambda c: _remove_old(c, self._kept, self._ready))
        except SandboxError as error:
            log.warning("volumes of images cannot be tidied: %s", error)


class _Filling:
    """One attempt to have the files of ``image`` in ``volume``. Blocking; ends soon after ``stop`` is set."""

    def __init__(self, image: Image, volume: str, user: int, labels: Mapping[str, str], stop: threading.Event) -> None:
        self._image = image
        self._volume = volume
        self._user = user
        self._labels = labels
        self._stop = stop

    def run(self, client: APIClient) -> bool:
        """``True`` once the volume is complete; ``False`` when another gateway fills it at the moment."""
        sink = self._sink(client)
        if sink is None:
            return False
        try:
            if not complete(client, sink):
                discard(client, sink)
                with contextlib.suppress(NotFound):
                    client.remove_volume(self._volume)  # what a broken filling left
                sink = self._sink(client)
                if sink is None:
                    return False
                self._fill(client, sink)
        finally:
            if sink is not None:
                discard(client, sink)
        return True

    def _sink(self, client: APIClient) -> str | None:
        """A container, never to be started, through which the volume can be written and read."""
        client.create_volume(
            self._volume, labels={KIND: VOLUME_KIND, _ID: self._image.id, _NAME: self._image.name[:200]}
        )
        mount = {
            "Type": "volume",
            "Source": self._volume,
            "Target": IMAGE,
            "VolumeOptions": {"NoCopy": True},
        }
        name = f"{self._volume}-filler"
        try:
            return self._create(client, name, {"Mounts": [mount]})
        except APIError as error:
            if error.status_code != 409:
                raise
        _clear_way(client, name)
        return None

    def _create(self, client: APIClient, name: str | None, settings: dict[str, Any]) -> str:
        settings = {"NetworkMode": "none", **settings}
        config = {"Image": self._image.id, "Entrypoint": [], "Cmd": _NEVER_RUN, "Labels": self._labels}
        return str(client.create_container_from_config({**config, "HostConfig": settings}, name)["Id"])

    def _fill(self, client: APIClient, sink: str) -> None:
        started = time.monotonic()
        source = self._create(client, None, {})
        try:
            client.put_archive(sink, IMAGE, rewriting.folders((ROOT, *_PLACES), owner=self._user))
            parts = rewriting.rewritten(client.export(source), owner=self._user, below=ROOT)
            client.put_archive(sink, IMAGE, self._until_stopped(parts))
        finally:
            discard(client, source)
        settings = ImageSettings(
            name=self._image.name, id=self._image.id, env=self._image.env, workdir=self._image.workdir
        )
        marker = rewriting.one_file(MARKER, msgspec.json.encode(settings), owner=self._user)
        client.put_archive(sink, IMAGE, marker)
        took = time.monotonic() - started
        log.info("image %s (%d MB) was unpacked in %.1f s", self._image.name, self._image.size >> 20, took)

    def _until_stopped(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        for part in parts:
            if self._stop.is_set():
                raise DockerError(f"unpacking image {self._image.name!r} was given up")
            yield part


def _clear_way(client: APIClient, filler: str) -> None:
    """Remove the container of a filling whose gateway is gone."""
    with contextlib.suppress(NotFound):
        labels = client.inspect_container(filler)["Config"].get("Labels") or {}
        if held(Path(labels.get(STATE, "/"))) is False:
            discard(client, filler)


def complete(client: APIClient, container: str) -> bool:
    """Whether the volume mounted in ``container`` is filled; it need not run. Blocking."""
    try:
        parts, _ = client.get_archive(container, f"{IMAGE}/{MARKER}")
        for _ in parts:
            pass
    except NotFound:
        return False
    return True


def _exists(client: APIClient, volume: str) -> bool:
    try:
        client.inspect_volume(volume)
    except NotFound:
        return False
    return True


def _remove_old(client: APIClient, kept: int, in_use: set[str]) -> None:
    found = client.volumes(filters={"label": f"{KIND}={VOLUME_KIND}"}).get("Volumes") or []
    newest = sorted(found, key=lambda volume: str(volume.get("CreatedAt")), reverse=True)
    for volume in newest[kept:]:
        if volume["Name"] not in in_use:
            with contextlib.suppress(APIError):  # a container uses it
                client.remove_volume(volume["Name"])
