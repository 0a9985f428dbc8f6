"""Sandboxes of real slots, as a host makes them; and arenas, where hostile programs meet them in every way there is."""

import asyncio
import importlib.util
import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from envfarm.core.errors import IsolationError
from envfarm.core.sandbox import SandboxProfile
from sandboxes.isolation import mounts
from sandboxes.isolation.bwrap import require_bwrap
from sandboxes.isolation.sandbox import slot_sandbox

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("hostile", HERE / "hostile.py")
hostile = importlib.util.module_from_spec(_spec)
sys.modules["hostile"] = hostile
_spec.loader.exec_module(hostile)

PROFILE = SandboxProfile(
    memory_bytes=hostile.MEMORY,
    disk_bytes=hostile.DISK,
    pids=hostile.PIDS,
    exec_seconds=hostile.SECONDS,
    output_bytes=hostile.OUTPUT,
)
SOMEBODY = 61_999  # a user of whom nothing else runs
WAYS = {
    "as we are": [],
    "without control groups": ["--no-control-groups"],
    "as somebody": ["--user", str(SOMEBODY)],
    "as somebody in plain folders": ["--user", str(SOMEBODY), "--no-mounts"],
}
ANSWER_SECONDS = 60.0


def pytest_collection_modifyitems(items):
    try:
        require_bwrap()
    except IsolationError as error:
        skip = pytest.mark.skip(reason=f"needs bubblewrap: {error}")
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(skip)


def pytest_generate_tests(metafunc):
    if "way" in metafunc.fixturenames:
        metafunc.parametrize("way", WAYS, scope="module")
    if "attack" in metafunc.fixturenames:
        metafunc.parametrize("attack", hostile.ATTACKS, ids=lambda attack: attack.name)


class Arena:
    """The process in which programs are run in one way."""

    def __init__(self, words):
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "arena.py"), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def fight(self, attack):
        self._process.stdin.write(f"{attack.name}\n".encode())
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_SECONDS)
        assert ready, f"no answer within {ANSWER_SECONDS:.0f} s"
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(10)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


@pytest.fixture(scope="module")  # none is left when other modules look at what runs
def arena(way):
    if WAYS[way] and os.geteuid() != 0:
        pytest.skip("needs root, to take things away from a process")
    made = Arena(WAYS[way])
    yield made
    made.close()


@pytest.fixture(scope="session")
def ground():
    made = mounts.own_ground()
    yield made
    mounts.leave_ground(made)
    assert not made.exists()


@pytest.fixture
async def sandbox(ground):
    made = slot_sandbox(ground, 0, PROFILE)
    await asyncio.to_thread(made.prepare)
    yield made
    made.close()


@pytest.fixture
def run(sandbox):
    """Run Python code inside; returns result and output."""
    from sandboxes.isolation.bwrap import python

    async def inside(code, seconds=None, box=sandbox):
        result = await box.exec([python(), "-I", "-c", code], seconds=seconds)
        return result, (result.stdout + result.stderr).decode(errors="replace")

    return inside
