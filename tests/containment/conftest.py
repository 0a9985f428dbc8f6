"""Sandboxes of real slots, as a host makes them."""

import asyncio

import pytest

from envfarm.core.errors import IsolationError
from envfarm.core.sandbox import SandboxProfile
from sandboxes.isolation import mounts
from sandboxes.isolation.bwrap import require_bwrap
from sandboxes.isolation.sandbox import slot_sandbox

PROFILE = SandboxProfile(memory_bytes=128 * 2**20, disk_bytes=8 * 2**20, pids=32, exec_seconds=2.0, output_bytes=16_384)


def pytest_collection_modifyitems(items):
    try:
        require_bwrap()
    except IsolationError as error:
        skip = pytest.mark.skip(reason=f"needs bubblewrap: {error}")
        for item in items:
            if "containment" in str(item.path):
                item.add_marker(skip)


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
async def neighbour(ground):
    made = slot_sandbox(ground, 1, PROFILE)
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
