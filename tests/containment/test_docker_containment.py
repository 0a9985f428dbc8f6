"""Every hostile program fails in a container of the docker backend too, soon, and its neighbour slot works on."""

import asyncio
import contextlib
import importlib.util
import json
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("docker")

from envfarm.core.sandbox import Isolation, SandboxProfile
from sandboxes.docker.backend import DockerBackend

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("backend_suite", HERE.parent / "compliance" / "backend_suite.py")
suite = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(suite)

pytestmark = [pytest.mark.containment, pytest.mark.docker, pytest.mark.xdist_group("docker")]
ENVIRONMENT = f"{HERE / 'docker_arena.py'}:Arena"
LIMIT = 2.0  # seconds
QUIET = 0.05  # seconds that a small command takes at most on a machine with nothing else to do
STALL = 1.0  # seconds that a neighbour's small command may take while somebody does his worst
SECONDS = 60.0


class Ground:
    """A host in a container with a neighbour's episode, on a loop of its own that lives as long as the module."""

    def __init__(self, host_image, docker_engine, state):
        self._engine = docker_engine
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        self._runner.run(self._open(host_image, state))

    async def _open(self, host_image, state):
        backend = DockerBackend(
            state, environments=[ENVIRONMENT], slots=2, max_hosts=1, host_image=host_image, pull="never"
        )
        self._stack.push_async_callback(backend.close)
        self.host = await backend.acquire(SandboxProfile(memory_bytes=2**27, disk_bytes=2**23, pids=32))
        self.neighbour = await self._stack.enter_async_context(suite.played(self.host, ENVIRONMENT, "neighbour"))

    def processes(self):
        """Of the container, by name, with how many there are."""
        (found,) = self._engine.containers(filters={"label": f"envfarm.id={self.host.id}"})
        return sorted(row[-1] for row in self._engine.top(found["Id"], ps_args="-eo pid,comm")["Processes"])

    def fight(self, name):
        return self._runner.run(self._fight(name))

    async def _fight(self, name):
        before = [float(await self.neighbour("small")) for _ in range(3)]
        meanwhile = []
        async with asyncio.timeout(SECONDS), suite.played(self.host, ENVIRONMENT, f"fighter: {name}") as fighter:
            attack = asyncio.create_task(fighter("fight", attack=name))
            while not attack.done():
                meanwhile.append(float(await self.neighbour("small")))
            told = json.loads(await attack)
            await fighter("small")
        return told, max(before), max(meanwhile)

    def close(self):
        self._runner.run(self._stack.aclose())
        self._runner.close()


@pytest.fixture(scope="module")
def container(host_image, docker_engine):
    with tempfile.TemporaryDirectory(prefix="dc-") as state:
        made = Ground(host_image, docker_engine, Path(state))
        try:
            yield made
        finally:
            made.close()


def test_a_hostile_program_is_held_in_a_container(container, attack):
    assert container.host.isolation is Isolation.CONTAINER
    processes = container.processes()
    told, before, meanwhile = container.fight(attack.name)
    assert told["breach"] == ""
    busy = 1 if before < QUIET and meanwhile < 2 * QUIET else 2  # others may be at work on this machine
    assert told["seconds"] < busy * LIMIT
    assert meanwhile < busy * STALL
    assert told["kept"] < 3 * 16_384
    assert container.processes() == processes, "processes are left"
