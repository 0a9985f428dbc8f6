"""The local backend passes the suite, and leaves no process behind."""

import asyncio
import importlib.util
import os
import signal
from pathlib import Path

import msgspec
import psutil
import pytest

from envfarm.core.errors import IsolationError, SandboxError
from envfarm.core.sandbox import HostState, Isolation, SandboxProfile
from sandboxes.local.backend import LocalBackend

_path = Path(__file__).with_name("backend_suite.py")
_spec = importlib.util.spec_from_file_location("backend_suite", _path)
suite = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(suite)

pytestmark = pytest.mark.compliance
ENVIRONMENT = "stockroom"


@pytest.fixture
def environment():
    return ENVIRONMENT


@pytest.fixture
def make(tmp_path):
    def backend(**options):
        options = {"environments": [ENVIRONMENT], "slots": 4, "max_hosts": 2, "lease": 30.0, **options}
        return LocalBackend(tmp_path, **options)

    return backend


@pytest.fixture
async def backend(make, tmp_path):
    made = make()
    yield made
    await made.close()
    assert hosts_of(tmp_path) == []


@pytest.fixture
async def successor(make):
    made = make()
    yield made
    await made.close()


def hosts_of(folder):
    return [
        p.pid
        for p in psutil.process_iter(["cmdline", "status"])
        if any(str(folder) in word for word in p.info["cmdline"] or ()) and p.info["status"] != psutil.STATUS_ZOMBIE
    ]


def folders_of(pid):
    return list(Path("/tmp").glob(f"envfarm-host-{pid}-*"))


class TestLocalBackend(suite.BackendSuite):
    """The suite, over processes."""


class TestLocalTrial(suite.TrialSuite):
    """What commands can and cannot do."""

    @pytest.fixture
    def environment(self):
        return f"{_path.with_name('trial.py')}:Trial"

    @pytest.fixture
    async def backend(self, make, environment):
        made = make(environments=[environment])
        yield made
        await made.close()


async def test_the_folder_of_sockets_is_closed_to_others(backend, tmp_path):
    await backend.acquire(SandboxProfile())
    assert (tmp_path / "hosts").stat().st_mode & 0o777 == 0o700


async def test_a_long_state_folder_still_works(tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    backend = LocalBackend(deep, environments=[ENVIRONMENT], slots=1)
    host = await backend.acquire(SandboxProfile())
    path = Path(host.address.removeprefix("unix:"))
    assert await suite.answers(host)
    assert len(os.fsencode(path)) <= 107
    assert path.parent.stat().st_mode & 0o777 == 0o700
    await backend.close()
    assert not path.parent.exists()


async def test_a_killed_host_is_noticed_at_once_with_its_cause(backend, tmp_path):
    host = await backend.acquire(SandboxProfile())
    changes = backend.watch()
    waiting = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0)
    (pid,) = hosts_of(tmp_path)
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        change = await waiting
    assert (change.id, change.state) == (host.id, HostState.GONE)
    assert "SIGKILL" in change.cause
    assert folders_of(pid) == []
    assert list(await backend.list()) == []
    await changes.aclose()


async def test_a_host_that_cannot_start_says_what_it_wrote(make):
    backend = make(slots=0)
    with pytest.raises(SandboxError, match=r"ended with status 2(.|\n)*--slots"):
        await backend.acquire(SandboxProfile())
    assert list(await backend.list()) == []
    await backend.close()


async def test_isolation_that_is_not_local_is_refused(backend):
    with pytest.raises(IsolationError, match="not container"):
        await backend.acquire(SandboxProfile(isolation=Isolation.CONTAINER))


async def test_a_host_that_serves_something_else_is_ended_not_adopted(backend, make):
    host = await backend.acquire(SandboxProfile())
    await backend.close(keep_hosts=True)
    other = make(environments=["reasoning_gym"])
    assert list(await other.list()) == []
    assert not await suite.answers(host)
    await other.close()


async def test_a_record_whose_process_is_gone_is_forgotten(backend, make, tmp_path):
    await backend.acquire(SandboxProfile())
    await backend.close(keep_hosts=True)
    (file,) = (tmp_path / "hosts").glob("*.json")
    record = msgspec.json.decode(file.read_bytes())
    os.kill(record["pid"], signal.SIGKILL)
    await asyncio.to_thread(os.waitpid, record["pid"], 0)
    successor = make()
    assert list(await successor.list()) == []
    assert not file.exists()
    await successor.close()


async def test_a_reused_process_id_is_not_taken_for_a_host(make, tmp_path):
    folder = tmp_path / "hosts"
    folder.mkdir()
    record = {
        "id": "host-old",
        "pid": os.getpid(),
        "started": 1.0,
        "address": "unix:/nowhere",
        "environments": [],
        "slots": 4,
    }
    (folder / "host-old.json").write_bytes(msgspec.json.encode(record))
    backend = make()
    assert list(await backend.list()) == []
    await backend.close()
    assert psutil.pid_exists(os.getpid())


async def test_a_folder_of_hosts_that_cannot_be_had_is_named(make, tmp_path):
    (tmp_path / "hosts").write_text("a file in its place")
    with pytest.raises(SandboxError, match="hosts"):
        await make().acquire(SandboxProfile())
    (tmp_path / "hosts").unlink()


async def test_a_host_that_cannot_be_written_down_does_not_run(make, tmp_path, monkeypatch):
    backend = make()
    await backend.list()

    def full(_record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(backend._folder, "write", full)
    with pytest.raises(SandboxError, match="No space left"):
        await backend.acquire(SandboxProfile())
    assert hosts_of(tmp_path) == []
    assert list(await backend.list()) == []


async def test_images_are_refused_with_what_to_use_instead(backend):
    with pytest.raises(SandboxError, match=r"no image 'toolbox:1': use --backend docker"):
        await backend.acquire(SandboxProfile(image="toolbox:1"))
