"""An engine that goes away while hosts run: they go on, what cannot be done says so, and all heals when it is back.

The engine is one of our own, so that others can use the usual one meanwhile.
"""

import asyncio
import contextlib
import importlib.util
import io
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("docker")

import docker
import psutil

from envfarm.core.errors import IsolationError
from envfarm.core.sandbox import Isolation, SandboxProfile
from sandboxes.docker.backend import DockerBackend
from sandboxes.docker.engine import Engine
from sandboxes.docker.errors import DockerError, DockerUnreachable
from sandboxes.docker.folders import HostFolders
from sandboxes.docker.images import Images, Pull
from sandboxes.docker.volumes import ImageVolumes

_path = Path(__file__).parents[1] / "compliance" / "backend_suite.py"
_spec = importlib.util.spec_from_file_location("backend_suite", _path)
suite = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(suite)

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("docker"),
]
SECONDS = 60.0
GVISOR = ["--network=none", "--host-uds=all"]


class OwnEngine:
    """A dockerd of our own, whose containers outlive it (``live-restore``)."""

    def __init__(self, folder):
        self.folder = folder
        self.url = f"unix://{folder}/sock"
        self._process = None
        runtimes = {"bare": {"path": "/usr/bin/runsc"}, "gvisor": {"path": "/usr/bin/runsc", "runtimeArgs": GVISOR}}
        (folder / "daemon.json").write_text(json.dumps({"runtimes": runtimes, "live-restore": True}))

    def start(self):
        places = {"config-file": "daemon.json", "data-root": "data", "exec-root": "exec", "pidfile": "pid"}
        # In a network of its own: at its start, a dockerd without a bridge removes docker0, whosever that is.
        argv = [
            "unshare",
            "--net",
            "--",
            "dockerd",
            *(f"--{flag}={self.folder / name}" for flag, name in places.items()),
        ]
        argv += [f"--host={self.url}", "--bridge=none", "--iptables=false", "--ip-forward=false", "--log-level=warn"]
        with (self.folder / "log").open("ab") as sink:
            self._process = subprocess.Popen(argv, stdout=sink, stderr=sink, start_new_session=True)
        end = time.monotonic() + SECONDS
        while True:
            if self._listens():
                return
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"dockerd does not serve: {(self.folder / 'log').read_text()[-500:]}")
            time.sleep(0.1)

    def _listens(self):
        with socket.socket(socket.AF_UNIX) as knocking:
            return knocking.connect_ex(str(self.folder / "sock")) == 0

    def client(self):
        return docker.APIClient(self.url, version="auto", timeout=60)

    def stop(self):
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(SECONDS)

    def hang(self):
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self._process.send_signal(signal.SIGCONT)

    def end(self):
        """With all containers."""
        if self._listens():
            with contextlib.closing(self.client()) as client:
                for container in client.containers(all=True):
                    client.remove_container(container["Id"], force=True)
        if self._process.poll() is None:
            self.stop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in psutil.process_iter(["cmdline"]):  # shims and kernels of gVisor outlive their engine
            if any(f"{self.folder}/exec/" in word for word in process.info["cmdline"] or []):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        for line in Path("/proc/self/mounts").read_text().splitlines():
            if line.split()[1].startswith(f"{self.folder}/"):
                subprocess.run(["umount", "--lazy", line.split()[1]], check=False)


@pytest.fixture(scope="module")
def own_engine(host_image, docker_engine):
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("needs root and dockerd")
    folder = Path(tempfile.mkdtemp(prefix="de-"))
    engine = OwnEngine(folder)
    try:
        try:
            engine.start()
        except RuntimeError as error:
            pytest.skip(f"needs a Docker Engine of its own: {error}")
        with contextlib.closing(engine.client()) as client:
            client._post(  # load_image() would read the image into memory
                client._url("/images/load"), data=docker_engine.get_image(host_image), timeout=None
            ).raise_for_status()
        yield engine
    finally:
        engine.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def backend(own_engine, host_image, tmp_path):
    made = maker(own_engine, host_image, tmp_path)()
    yield made
    await made.close()
    with contextlib.closing(own_engine.client()) as client:
        assert client.containers(all=True) == []


def maker(own_engine, host_image, state):
    def make(**options):
        return DockerBackend(
            state,
            **{"environments": ["stockroom"], "slots": 2, "max_hosts": 2, "pull": "never", **options},
            host_image=host_image,
            engine=own_engine.url,
        )

    return make


@contextlib.asynccontextmanager
async def away(own_engine):
    await asyncio.to_thread(own_engine.stop)
    try:
        yield
    finally:
        await asyncio.to_thread(own_engine.start)


async def test_hosts_go_on_without_their_engine_and_are_kept_when_it_is_back(backend, own_engine, caplog):
    caplog.set_level(logging.INFO, "sandboxes.docker.watch")
    host = await backend.acquire(SandboxProfile())
    async with away(own_engine):
        async with asyncio.timeout(20):
            while not said(caplog, "no Docker Engine answers"):  # noqa: ASYNC110 - a thread logs it
                await asyncio.sleep(0.05)
            assert await suite.answers(host)
            for _ in range(2):
                with pytest.raises(DockerUnreachable, match="start it"):
                    await backend.acquire(SandboxProfile())
            assert list(await backend.list()) == [host]
    async with asyncio.timeout(SECONDS):
        second = await backend.acquire(SandboxProfile())
        while not said(caplog, "is back"):  # noqa: ASYNC110 - a thread logs it
            await asyncio.sleep(0.05)
    assert list(await backend.list()) == [host, second]
    assert await suite.answers(host)
    assert len(said(caplog, "no Docker Engine answers")) == len(said(caplog, "is back")) == 1


async def test_a_host_that_cannot_be_replaced_without_the_engine_is_replaced_when_it_is_back(backend, own_engine):
    host = await backend.acquire(SandboxProfile())
    async with away(own_engine), asyncio.timeout(20):
        with pytest.raises(DockerUnreachable, match="start it"):
            await backend.recycle(host.id, "as a gateway does with one that is lost")
        assert [found.id for found in await backend.list()] == [host.id]
    async with asyncio.timeout(SECONDS):
        replacement = await backend.recycle(host.id, "as it goes on trying")
    assert list(await backend.list()) == [replacement]
    assert not await suite.answers(host)


async def test_an_end_in_the_absence_of_the_engine_is_noticed_when_it_is_back(backend, own_engine):
    host = await backend.acquire(SandboxProfile())
    with contextlib.closing(own_engine.client()) as client:
        (container,) = client.containers()
        pid = client.inspect_container(container["Id"])["State"]["Pid"]
    changes = backend.watch()
    gone = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0)
    async with away(own_engine):
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(SECONDS):
        change = await gone
    await changes.aclose()
    assert (change.id, change.state.value) == (host.id, "gone")
    assert "137" in change.cause
    assert list(await backend.list()) == []


async def test_what_an_old_engine_may_not_remove_is_removed_by_the_next_gateway(own_engine, host_image, tmp_path):
    make = maker(own_engine, host_image, tmp_path)
    first = make()
    await first.acquire(SandboxProfile())
    await first.close(keep_hosts=True)
    with contextlib.closing(own_engine.client()) as client:
        (container,) = client.containers()
        client.kill(container["Id"])
        second = make()
        assert list(await second.list()) == []
        assert client.containers(all=True) == []
        await second.close()


async def test_an_engine_that_hangs_makes_nobody_wait_for_ever(backend, own_engine):
    host = await backend.acquire(SandboxProfile())
    engine = Engine(own_engine.url)
    own_engine.hang()
    try:
        async with asyncio.timeout(20):
            assert await suite.answers(host)
            assert list(await backend.list()) == [host]
            with pytest.raises(DockerUnreachable, match="overloaded"):
                await engine.call("asking for something", lambda client: client.ping(), 0.1)
    finally:
        own_engine.go_on()
        engine.close()
    async with asyncio.timeout(SECONDS):
        second = await backend.acquire(SandboxProfile())
    assert list(await backend.list()) == [host, second]


def said(caplog, words):
    """Lines of the log with ``words``."""
    return [record for record in caplog.records if words in record.getMessage()]


async def test_volumes_beyond_the_newest_that_nobody_uses_are_removed(own_engine, tmp_path):
    client, engine = own_engine.client(), Engine(own_engine.url)
    folders = [HostFolders(tmp_path / str(number)) for number in range(3)]
    with contextlib.closing(client), contextlib.closing(engine):
        names = []
        for number, folder in enumerate(folders):  # another gateway each, that knows nothing of the others
            entry, tar = tarfile.TarInfo(f"file-{number}"), io.BytesIO()
            with tarfile.open(fileobj=tar, mode="w") as out:
                out.addfile(entry)
            client.import_image_from_data(tar.getvalue(), repository="envfarm-test-old", tag=str(number))
            image = await Images(engine, Pull.NEVER).get(f"envfarm-test-old:{number}")
            volumes = ImageVolumes(engine, folder.prepare(), folder.path, 65_530, kept=1)
            names.append(await volumes.get(image))
            if number == 0:
                mount = {"Type": "volume", "Source": names[0], "Target": "/image"}
                settings = {"HostConfig": {"Mounts": [mount]}, "Image": image.id, "Cmd": ["never"]}
                used = client.create_container_from_config(settings)["Id"]
            await asyncio.to_thread(until_the_second_is_over)
        left = {volume["Name"] for volume in client.volumes()["Volumes"]}
        client.remove_container(used)
        for folder in folders:
            folder.close()
    assert left == {names[0], names[2]}


def until_the_second_is_over():
    """The engine tells when a volume was made to the second."""
    time.sleep(1.0 - time.time() % 1.0)


async def test_a_runtime_in_which_commands_cannot_be_confined_is_refused_with_the_remedy(
    own_engine, host_image, tmp_path
):
    if shutil.which("runsc") is None:
        pytest.skip("needs runsc")
    make = maker(own_engine, host_image, tmp_path)
    bare, gvisor = make(runtime="bare"), make(runtime="gvisor")
    try:
        with pytest.raises(DockerError, match="needs the arguments --network=none and --host-uds=all"):
            await bare.acquire(SandboxProfile())
        refused = await outcome(gvisor.acquire(SandboxProfile()))
        assert "leave the option runtime out" in refused or refused == Isolation.CONTAINER.value
    finally:
        await bare.close()
        await gvisor.close()


async def outcome(acquiring):
    """Why a host is refused for its isolation, else the level that it reaches (where bubblewrap works in gVisor)."""
    try:
        return (await acquiring).isolation.value
    except IsolationError as error:
        return str(error)
