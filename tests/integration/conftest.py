"""A real host process and a stream to it; and ground for slots in this very process."""

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from envfarm.core.task import Task
from envfarm.wire.channel import connect
from envfarm.wire.convert.tasks import task_to_pb
from envfarm.wire.mux import MuxClient
from envfarm.wire.v1 import host_pb2, host_pb2_grpc, types_pb2
from sandboxes.isolation import mounts

ENVIRONMENTS = Path(__file__).parent / "hostile_environments.py"
SECONDS = 20.0
_numbers = itertools.count()


class HostUnderTest:
    """A host process, its stub and its stream, with the commands that tests speak."""

    def __init__(self, process, channel, stub, mux, prefix):
        self.process = process
        self.channel = channel
        self.stub = stub
        self.mux = mux
        self.prefix = prefix
        self.own = ""

    def name(self, environment):
        return environment if self.prefix is None else f"{self.prefix}:{environment}"

    async def inspect(self):
        return await self.stub.Inspect(host_pb2.InspectRequest(), timeout=SECONDS)

    async def tasks(self, environment, offset=0, limit=3, split="train"):
        request = host_pb2.ListTasksRequest(environment=self.name(environment), split=split, offset=offset, limit=limit)
        return [t.id for t in (await self.stub.ListTasks(request, timeout=SECONDS)).tasks]

    async def acquire(self, episode, environment="Counter", seed=1, timeout=0.0, files=None, **data):
        task = task_to_pb(Task(id="t", prompt="go", data=data, files=files or {}))
        request = host_pb2.AcquireSlot(
            episode_id=self.own + episode, environment=self.name(environment), task=task, seed=seed, timeout_s=timeout
        )
        return (await self.mux.call(host_pb2.SlotCommand(acquire=request), SECONDS)).acquired

    async def step(self, episode, index, *calls, digest=b"d", **fields):
        """``calls``: pairs of tool name and arguments."""
        pbs = [
            types_pb2.ToolCall(id=f"call_{i}", name=name, arguments=msgspec.json.encode(arguments).decode())
            for i, (name, arguments) in enumerate(calls)
        ]
        fields.setdefault("order", [c.id for c in pbs])
        request = host_pb2.RunStep(episode_id=self.own + episode, index=index, digest=digest, calls=pbs, **fields)
        return (await self.mux.call(host_pb2.SlotCommand(step=request), SECONDS)).ran

    async def release(self, episode):
        await self.mux.call(host_pb2.SlotCommand(release=host_pb2.ReleaseSlot(episode_id=self.own + episode)), SECONDS)


class HostProcess:
    """A host process and the address at which it serves."""

    def __init__(self, process, address, prefix):
        self.process = process
        self.address = address
        self.prefix = prefix


@contextlib.contextmanager
def host_process(*environments, slots=4, lease=20.0, prefix=ENVIRONMENTS, env=None):
    with tempfile.TemporaryDirectory(prefix="ef-") as folder:
        address_file, log = Path(folder) / "address", Path(folder) / "log"
        argv = [sys.executable, "-m", "sandboxes.host", "--id", "host-test", "--listen", f"unix:{folder}/s"]
        argv += ["--slots", str(slots), "--lease", str(lease), "--address-file", str(address_file)]
        for name in environments:
            argv += ["--environment", name if prefix is None else f"{prefix}:{name}"]
        with log.open("wb") as sink:
            process = subprocess.Popen(argv, stderr=sink, start_new_session=True, env={**os.environ, **(env or {})})
        try:
            end = time.monotonic() + SECONDS
            while not address_file.exists():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.01)
            yield HostProcess(process, address_file.read_text(), prefix)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(SECONDS)


@contextlib.asynccontextmanager
async def connected(process):
    channel = connect(process.address)
    stub = host_pb2_grpc.HostServiceStub(channel)
    async with MuxClient("host", stub.Drive, host_pb2.DriveRequest) as mux:
        yield HostUnderTest(process.process, channel, stub, mux, process.prefix)
    await channel.close()


@contextlib.asynccontextmanager
async def running_host(*environments, **options):
    with host_process(*environments, **options) as process:
        async with connected(process) as host:
            yield host


@pytest.fixture(scope="module")
def ground():
    """Where slots' files may lie, mounted where this process may."""
    made = mounts.own_ground()
    yield made
    mounts.leave_ground(made)
    assert not made.exists()


@pytest.fixture
def host_of():
    """``async with host_of("Counter", slots=2) as host``: a process of its own."""
    return running_host


@pytest.fixture(scope="session")
def process_of():
    """``with process_of("NAME", prefix=None) as process``: a host process for tests that share one."""
    return host_process


@pytest.fixture(scope="session")
def connection_to():
    """``async with connection_to(process) as host``."""
    return connected


@pytest.fixture(scope="module")
def shared_process():
    with host_process("Counter", "Plain", "Workshop", slots=64) as process:
        yield process


@pytest.fixture
async def host(shared_process):
    """A host that other tests use too; episode ids are this test's own."""
    async with connected(shared_process) as running:
        running.own = f"{next(_numbers)}-"
        yield running


@pytest.fixture
def until():
    """Wait until a condition (plain or async) holds."""

    async def wait(condition, seconds=SECONDS):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            result = condition()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return result
            await asyncio.sleep(0.01)
        raise AssertionError("the condition did not come true in time")

    return wait


@pytest.fixture(autouse=True)
def others_orphans_are_buried():
    """A process that ran commands adopts orphans: in this one those of hosts that earlier tests killed as well."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
