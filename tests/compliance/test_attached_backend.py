"""Hosts that somebody else starts: the suite, over real processes that a small supervisor starts again and again."""

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest

from envfarm.core.errors import SandboxError
from envfarm.core.sandbox import HostState, SandboxProfile
from sandboxes.attached.backend import AttachedBackend

_path = Path(__file__).with_name("backend_suite.py")
_spec = importlib.util.spec_from_file_location("backend_suite", _path)
suite = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(suite)

pytestmark = pytest.mark.compliance
ENVIRONMENT = "stockroom"
SECONDS = 30.0


class Supervisor:
    """Keeps hosts running in a folder, as compose or systemd would: one that ends is started again."""

    def __init__(self, folder, tasks):
        self.folder = folder
        self._tasks = tasks
        self._keepers = []
        self.processes = {}

    def keep(self, name, *flags, environment=ENVIRONMENT):
        argv = ["--listen", f"unix:{self.folder}/{{id}}.sock", "--slots", "4", "--lease", "30"]
        argv += ["--environment", environment, *flags]
        self._keepers.append(self._tasks.create_task(self._keep(name, argv)))

    async def _keep(self, name, argv):
        while True:
            with (self.folder / f"{name}.log").open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "sandboxes.host", *argv, stderr=log, start_new_session=True
                )
            self.processes[name] = process
            try:
                await process.wait()
            finally:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()

    def stop(self):
        for keeper in self._keepers:
            keeper.cancel()


@pytest.fixture
def environment():
    return ENVIRONMENT


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("h")


@pytest.fixture
async def supervisor(folder):
    async with asyncio.TaskGroup() as tasks:
        made = Supervisor(folder, tasks)
        yield made
        made.stop()


@pytest.fixture
def make(tmp_path, folder):
    def backend(state="state", **options):
        options = {"environments": [ENVIRONMENT], "slots": 4, "max_hosts": 2, "folder": folder, "wait": 40, **options}
        return AttachedBackend(tmp_path / state, **options)

    return backend


@pytest.fixture
async def backend(make, supervisor):
    for name in "ab":
        supervisor.keep(name)
    made = make()
    yield made
    await made.close()


@pytest.fixture
async def successor(make):
    made = make()
    yield made
    await made.close()


class TestAttachedBackend(suite.BackendSuite):
    """The suite, over hosts that were started by somebody else."""


class TestAttachedTrial(suite.TrialSuite):
    """What commands can and cannot do."""

    @pytest.fixture
    def environment(self):
        return f"{_path.with_name('trial.py')}:Trial"

    @pytest.fixture
    async def backend(self, make, supervisor, environment):
        supervisor.keep("a", environment=environment)
        made = make(environments=[environment], max_hosts=1)
        yield made
        await made.close()


async def test_a_host_that_comes_late_is_waited_for(make, supervisor):
    backend = make()
    waiting = asyncio.create_task(backend.acquire(SandboxProfile()))
    await asyncio.sleep(0)
    supervisor.keep("late")
    host = await waiting
    assert await suite.answers(host)
    await backend.close()


async def test_when_no_host_comes_the_error_says_how_to_start_one(make, folder):
    backend = make(wait=0.3)
    with pytest.raises(SandboxError, match="envfarm host --listen") as told:
        await backend.acquire(SandboxProfile())
    assert str(folder) in str(told.value)
    assert f"--environment {ENVIRONMENT}" in str(told.value)
    await backend.close()


async def test_a_host_with_other_environments_is_not_taken_and_that_is_said(make, supervisor):
    supervisor.keep("other", environment="reasoning_gym")
    backend = make(wait=15)
    with pytest.raises(SandboxError, match="it serves reasoning_gym, and stockroom is asked for"):
        await backend.acquire(SandboxProfile())
    await backend.close()


async def test_a_host_is_taken_for_the_image_that_it_shows_and_for_no_other(make, supervisor, tmp_path):
    root = tmp_path / "image" / "root"
    root.mkdir(parents=True)
    supervisor.keep("plain")
    supervisor.keep("imaged", "--image", "tools:1", "--root", str(root))
    backend = make(max_hosts=3)
    assert (await backend.acquire(SandboxProfile(image="tools:1"))).image == "tools:1"
    assert (await backend.acquire(SandboxProfile())).image == ""
    await backend.close()
    none = make("other", wait=0.3)
    with pytest.raises(SandboxError, match=r"--image other:1 --root"):
        await none.acquire(SandboxProfile(image="other:1"))
    await none.close()


async def test_two_gateways_never_have_the_same_host(backend, make):
    other = make(state="another", wait=1)
    first, second = await asyncio.gather(backend.acquire(SandboxProfile()), backend.acquire(SandboxProfile()))
    with pytest.raises(SandboxError, match="no free host"):
        await other.acquire(SandboxProfile())
    assert first.id != second.id
    await other.close()
    assert await suite.answers(first)


async def test_a_killed_host_is_noticed_and_another_one_takes_its_place(make, supervisor):
    supervisor.keep("only")
    backend = make()
    host = await backend.acquire(SandboxProfile())
    changes = backend.watch()
    waiting = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0)
    os.kill(supervisor.processes["only"].pid, signal.SIGKILL)
    async with asyncio.timeout(SECONDS):
        change = await waiting
    assert (change.id, change.state) == (host.id, HostState.GONE)
    assert change.cause
    successor = await backend.recycle(host.id, "it was killed")
    assert successor.id != host.id
    await changes.aclose()
    await backend.close()


async def test_a_broken_environment_does_not_keep_a_host_from_being_taken(make, supervisor, tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("class Broken(\n")
    name = f"{file}:Broken"
    supervisor.keep("broken", "--environment", name)
    backend = make(environments=[ENVIRONMENT, name])
    host = await backend.acquire(SandboxProfile())
    assert "broken.py" in (await suite.inspect(host)).broken[0]
    await backend.close()


async def test_a_folder_that_cannot_be_had_is_named(make, tmp_path):
    (tmp_path / "file").write_text("in its place")
    backend = make(folder=tmp_path / "file" / "hosts")
    with pytest.raises(SandboxError, match="folder of attached hosts"):
        await backend.acquire(SandboxProfile())
