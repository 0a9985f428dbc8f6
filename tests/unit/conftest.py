"""A sandbox of a real slot, for tests of what runs in one."""

import asyncio

import pytest

from envfarm.core.errors import IsolationError
from envfarm.core.sandbox import SandboxProfile
from sandboxes.isolation import mounts
from sandboxes.isolation.bwrap import require_bwrap
from sandboxes.isolation.sandbox import slot_sandbox


@pytest.fixture(scope="session")
def slot_ground():
    try:
        require_bwrap()
    except IsolationError as error:
        pytest.skip(f"needs bubblewrap: {error}")
    made = mounts.own_ground()
    yield made
    mounts.leave_ground(made)


@pytest.fixture
async def slot(slot_ground):
    """A sandbox as an environment of the default profile has it."""
    made = slot_sandbox(slot_ground, 7, SandboxProfile())
    await asyncio.to_thread(made.prepare)
    yield made
    made.close()
