"""Files of images in volumes of a real engine: filled once, thrown away when broken, and given up at once."""

import asyncio
import contextlib
import io
import logging
import socket
import tarfile
import threading
import time

import pytest

pytest.importorskip("docker")

from docker.errors import NotFound

from envfarm.core.ids import new_id
from sandboxes.docker import rewriting
from sandboxes.docker.container import IMAGE
from sandboxes.docker.engine import Engine
from sandboxes.docker.folders import HostFolders
from sandboxes.docker.images import Images, Pull
from sandboxes.docker.volumes import MARKER, ROOT, ImageVolumes

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker")]
USER = 65_530  # volumes of no real host
SOON = 5.0  # seconds
LARGE = 192 << 20


@pytest.fixture
async def engine(docker_engine):
    made = Engine()
    yield made
    made.close()


@pytest.fixture
def image(docker_engine):
    """Makes an image with a file ``data`` of so many zeros; it and its volumes go with the test."""
    made = []

    def imported(size):
        name = f"envfarm-test-{new_id('volume')}:1"
        made.append(name)
        entry = tarfile.TarInfo("data")
        entry.size = size
        tar = io.BytesIO()
        with tarfile.open(fileobj=tar, mode="w") as out:
            out.addfile(entry, io.BytesIO(bytes(size)))
        docker_engine.import_image_from_data(tar.getvalue(), repository=name.partition(":")[0], tag="1")
        return name

    yield imported
    for name in made:
        for volume in docker_engine.volumes(filters={"label": f"envfarm.image.name={name}"})["Volumes"] or []:
            docker_engine.remove_volume(volume["Name"])
        docker_engine.remove_image(name)


@pytest.fixture
def gateway(engine, tmp_path):
    """Makes the volumes of one gateway more."""
    folders = []

    def volumes():
        folder = HostFolders(tmp_path / str(len(folders)))
        folders.append(folder)
        return ImageVolumes(engine, folder.prepare(), folder.path, USER, kept=1000)

    yield volumes
    for folder in folders:
        folder.close()


@contextlib.contextmanager
def mounted(docker_engine, image, volume):
    """A container that never runs, to look into ``volume``."""
    mount = {"Type": "volume", "Source": volume, "Target": IMAGE, "VolumeOptions": {"NoCopy": True}}
    config = {"Image": image, "Entrypoint": [], "Cmd": ["never"], "HostConfig": {"Mounts": [mount]}}
    container = docker_engine.create_container_from_config(config)["Id"]
    try:
        yield container
    finally:
        docker_engine.remove_container(container)


def has(docker_engine, container, path):
    try:
        parts, _ = docker_engine.get_archive(container, f"{IMAGE}/{path}")
        for _ in parts:
            pass
    except NotFound:
        return False
    return True


def fillers(docker_engine, volume=""):
    found = docker_engine.containers(all=True, filters={"label": "envfarm.kind=filler"})
    return [c for c in found if not volume or f"/{volume}-filler" in c["Names"]]


async def test_callers_and_gateways_wait_for_one_filling(engine, image, gateway, docker_engine, caplog):
    caplog.set_level(logging.INFO, "sandboxes.docker.volumes")
    found = await Images(engine, Pull.NEVER).get(image(32 << 20))
    one, other = gateway(), gateway()
    async with asyncio.timeout(60):
        names = await asyncio.gather(*(volumes.get(found) for volumes in (one, other) for _ in range(4)))
    assert len(set(names)) == 1
    assert len([line for line in caplog.messages if "was unpacked" in line]) == 1
    assert fillers(docker_engine, names[0]) == []
    with mounted(docker_engine, found.id, names[0]) as container:
        assert has(docker_engine, container, MARKER)
        assert has(docker_engine, container, f"{ROOT}/data")


async def test_a_volume_that_is_half_filled_is_thrown_away(engine, image, gateway, docker_engine):
    found = await Images(engine, Pull.NEVER).get(image(1000))
    name = await gateway().get(found)
    docker_engine.remove_volume(name)
    docker_engine.create_volume(name)
    with mounted(docker_engine, found.id, name) as container:
        docker_engine.put_archive(container, IMAGE, rewriting.one_file("half", b"x", owner=USER))
    async with asyncio.timeout(60):
        assert await gateway().get(found) == name
    with mounted(docker_engine, found.id, name) as container:
        assert has(docker_engine, container, f"{ROOT}/data")
        assert not has(docker_engine, container, "half")


async def test_a_volume_that_somebody_removed_is_filled_again(engine, image, gateway, docker_engine):
    found = await Images(engine, Pull.NEVER).get(image(1000))
    volumes = gateway()
    name = await volumes.get(found)
    docker_engine.remove_volume(name)
    assert await volumes.get(found) == name
    with mounted(docker_engine, found.id, name) as container:
        assert has(docker_engine, container, MARKER)


async def test_a_filling_that_is_given_up_ends_at_once_and_the_next_one_succeeds(engine, image, gateway, docker_engine):
    found = await Images(engine, Pull.NEVER).get(await asyncio.to_thread(image, LARGE))
    volumes = gateway()
    filling = asyncio.create_task(volumes.get(found))
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(fillers, docker_engine):  # noqa: ASYNC110 - the engine tells no event
            await asyncio.sleep(0)
    filling.cancel()
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await filling
    assert time.monotonic() - began < SOON
    assert not [c for c in fillers(docker_engine) if c["ImageID"] == found.id]
    async with asyncio.timeout(60):
        name = await volumes.get(found)
    with mounted(docker_engine, found.id, name) as container:
        assert has(docker_engine, container, MARKER)


async def test_a_pull_from_a_silent_registry_is_given_up_at_once(engine):
    asked = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    held.append(server.accept())
                    asked.set()

        held = []
        thread = threading.Thread(target=accept)
        thread.start()
        images = Images(engine, Pull.MISSING)
        pull = asyncio.create_task(images.get(f"127.0.0.1:{server.getsockname()[1]}/some/image:1"))
        assert await asyncio.to_thread(asked.wait, 20)
        pull.cancel()
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await pull
        assert time.monotonic() - began < SOON
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        for connection, _ in held:
            connection.close()
