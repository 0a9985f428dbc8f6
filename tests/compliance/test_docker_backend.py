"""The docker backend passes the suite, and leaves neither containers nor folders behind."""

import asyncio
import importlib.util
import os
from pathlib import Path

import pytest

pytest.importorskip("docker")

import requests

from envfarm.core.errors import IsolationError, SandboxError
from envfarm.core.sandbox import HostState, Isolation, SandboxProfile
from sandboxes.docker.backend import DockerBackend
from sandboxes.docker.errors import DockerUnreachable, engine_error

_path = Path(__file__).with_name("backend_suite.py")
_spec = importlib.util.spec_from_file_location("backend_suite", _path)
suite = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(suite)

pytestmark = [pytest.mark.compliance, pytest.mark.docker, pytest.mark.xdist_group("docker")]
ENVIRONMENT = "stockroom"


@pytest.fixture
def environment():
    return ENVIRONMENT


@pytest.fixture
def make(tmp_path, host_image):
    def backend(**options):
        options = {"environments": [ENVIRONMENT], "slots": 4, "max_hosts": 2, "lease": 30.0, **options}
        options = {"host_image": host_image, "pull": "never", **options}
        return DockerBackend(tmp_path, **options)

    return backend


@pytest.fixture
def containers(docker_engine, tmp_path):
    """Every container of the backends of this test: its id, and what the engine says of it."""

    def found():
        file = tmp_path / "docker" / "owner"
        if not file.exists():
            return {}
        labels = {"label": f"envfarm.owner={file.read_text().strip()}"}
        return {c["Id"]: c for c in docker_engine.containers(all=True, filters=labels)}

    return found


@pytest.fixture
async def backend(make, containers, tmp_path):
    made = make()
    yield made
    await made.close()
    assert containers() == {}
    assert list((tmp_path / "docker").glob("host-*")) == []


@pytest.fixture
async def successor(make):
    made = make()
    yield made
    await made.close()


class TestDockerBackend(suite.BackendSuite):
    """The suite, over containers."""


class TestDockerTrial(suite.TrialSuite):
    """What commands can and cannot do, in a host that reads the environment from a folder of ours."""

    @pytest.fixture
    def environment(self):
        return "/trial/trial.py:Trial"

    @pytest.fixture
    async def backend(self, make, containers, environment):
        made = make(environments=[environment], mounts=[f"{_path.parent}:/trial"])
        yield made
        await made.close()
        assert containers() == {}


async def test_commands_in_a_container_are_confined_and_it_says_so(backend):
    host = await backend.acquire(SandboxProfile(isolation=Isolation.CONTAINER))
    assert host.isolation is Isolation.CONTAINER


async def test_a_host_has_no_network_no_rights_and_a_system_that_it_cannot_change(backend, containers, docker_engine):
    await backend.acquire(SandboxProfile(memory_bytes=128 << 20, disk_bytes=32 << 20, pids=32, cpus=0.25))
    (container,) = containers()
    seen = docker_engine.inspect_container(container)
    settings = seen["HostConfig"]
    assert settings["NetworkMode"] == "none"
    assert settings["ReadonlyRootfs"]
    assert settings["CapDrop"] == ["ALL"]
    assert "no-new-privileges" in settings["SecurityOpt"]
    assert any(option.startswith("seccomp={") for option in settings["SecurityOpt"])
    assert settings["Memory"] == settings["MemorySwap"] == (512 << 20) + 4 * (160 << 20)
    assert settings["PidsLimit"] == 256 + 4 * 40
    assert settings["NanoCpus"] == min(2.0, os.cpu_count()) * 1e9
    assert not seen["NetworkSettings"]["Ports"]
    assert seen["Config"]["User"] not in ("", "0", "0:0", "root")
    status = docker_engine.exec_start(docker_engine.exec_create(container, ["cat", "/proc/self/status"])["Id"]).decode()
    facts = dict(line.split(":", 1) for line in status.splitlines())
    assert int(facts["CapEff"], 16) == int(facts["CapBnd"], 16) == 0
    assert facts["NoNewPrivs"].strip() == "1"
    assert facts["Seccomp"].strip() == "2"


async def test_the_folder_of_sockets_is_closed_to_others(backend, tmp_path):
    host = await backend.acquire(SandboxProfile())
    assert (tmp_path / "docker").stat().st_mode & 0o777 == 0o700
    assert Path(host.address.removeprefix("unix:")).parent.stat().st_mode & 0o777 == 0o700


async def test_a_long_state_folder_still_works(host_image, tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    backend = DockerBackend(deep, environments=[ENVIRONMENT], slots=1, host_image=host_image, pull="never")
    host = await backend.acquire(SandboxProfile())
    path = Path(host.address.removeprefix("unix:"))
    assert await suite.answers(host)
    assert len(os.fsencode(path)) <= 107
    assert path.parent.stat().st_mode & 0o777 == 0o700
    await backend.close()
    assert not path.parent.exists()


async def test_a_killed_host_is_noticed_at_once_with_its_cause(backend, containers, docker_engine):
    host = await backend.acquire(SandboxProfile())
    changes = backend.watch()
    waiting = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0)
    (container,) = containers()
    docker_engine.kill(container)
    async with asyncio.timeout(10):
        change = await waiting
    assert (change.id, change.state) == (host.id, HostState.GONE)
    assert "SIGKILL" in change.cause
    assert "serves 4 slots" in change.cause  # what its log said last
    assert list(await backend.list()) == []
    await changes.aclose()


def fill(engine, container, file, megabytes):
    """Memory that belongs to no process, so that the kernel takes the biggest process there is: the host."""
    command = ["dd", "if=/dev/zero", f"of={file}", "bs=1M", f"count={megabytes}"]
    engine.exec_start(engine.exec_create(container, command)["Id"])


async def test_a_host_that_runs_out_of_memory_says_so(backend, containers, docker_engine):
    host = await backend.acquire(SandboxProfile(memory_bytes=1 << 20, disk_bytes=1 << 20))
    changes = backend.watch()
    waiting = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0)
    (container,) = containers()
    await asyncio.to_thread(fill, docker_engine, container, "/tmp/full", 250)
    docker_engine.update_container(container, mem_limit="340m", memswap_limit="340m")
    await asyncio.to_thread(fill, docker_engine, container, "/dev/shm/full", 63)
    async with asyncio.timeout(20):
        change = await waiting
    assert (change.id, change.state) == (host.id, HostState.GONE)
    assert "out of memory" in change.cause
    await changes.aclose()


async def test_a_host_that_cannot_start_says_what_it_wrote(make, containers):
    backend = make(slots=0)
    with pytest.raises(SandboxError, match=r"ended with status 2(.|\n)*--slots"):
        await backend.acquire(SandboxProfile())
    assert list(await backend.list()) == []
    assert containers() == {}
    await backend.close()


async def test_isolation_that_a_container_does_not_give_is_refused(backend):
    with pytest.raises(IsolationError, match="not gvisor"):
        await backend.acquire(SandboxProfile(isolation=Isolation.GVISOR))


async def test_a_runtime_that_the_engine_does_not_know_is_refused_with_the_remedy(make):
    backend = make(runtime="runsc-of-nobody")
    with pytest.raises(IsolationError, match=r"no runtime 'runsc-of-nobody'(.|\n)*daemon.json"):
        await backend.acquire(SandboxProfile())
    await backend.close()


async def test_a_host_that_serves_something_else_is_ended_not_adopted(backend, make):
    host = await backend.acquire(SandboxProfile())
    await backend.close(keep_hosts=True)
    other = make(environments=["reasoning_gym"])
    assert list(await other.list()) == []
    assert not await suite.answers(host)
    await other.close()


async def test_an_opening_that_is_given_up_leaves_no_container(make, containers):
    backend = make()
    await backend.list()
    opening = asyncio.create_task(backend.acquire(SandboxProfile()))
    async with asyncio.timeout(20):
        while not await asyncio.to_thread(containers):  # noqa: ASYNC110 - the engine tells no event before
            await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert containers() == {}
    assert list(await backend.list()) == []
    await backend.close()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("unix:///nowhere/docker.sock", "start it"),
        ("unix:///dev/null", "start it"),
        ("tcp://127.0.0.1:1", "not on this machine"),
    ],
)
async def test_an_engine_that_is_not_there_is_named_with_the_remedy(make, url, says):
    backend = make(engine=url)
    async with asyncio.timeout(20):
        with pytest.raises(SandboxError, match=says) as raised:
            await backend.acquire(SandboxProfile())
        assert url in str(raised.value)
        await backend.close()


async def test_a_socket_that_one_may_not_open_is_named_with_the_remedy(tmp_path):
    refusal = requests.exceptions.ConnectionError(PermissionError(13, "Permission denied"))
    error = engine_error("doing it", refusal, "unix:///var/run/docker.sock")
    assert isinstance(error, DockerUnreachable)
    assert "group" in str(error)


async def test_an_engine_that_never_answers_does_not_hang_the_backend(make, tmp_path, monkeypatch):
    monkeypatch.setattr("sandboxes.docker.engine.CALL_SECONDS", 1.0)

    async def silent(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(silent, tmp_path / "s")
    backend = make(engine=f"unix://{tmp_path}/s")
    async with asyncio.timeout(20):
        with pytest.raises(DockerUnreachable, match=r"does not answer"):
            await backend.acquire(SandboxProfile())
    await backend.close()
    server.close()
    await server.wait_closed()
