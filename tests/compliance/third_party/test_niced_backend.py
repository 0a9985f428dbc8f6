"""Somebody else's backend passes the suite: what docs/backends.md tells to write."""

import importlib.util
from pathlib import Path

import pytest


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__).parent
SUITE = HERE.parent / "backend_suite.py"
suite = load(SUITE)
NicedBackend = load(HERE / "niced.py").NicedBackend
pytestmark = pytest.mark.compliance


@pytest.fixture
def environment():
    return "stockroom"


@pytest.fixture
async def backend(tmp_path, environment):
    made = NicedBackend(tmp_path, environments=[environment], slots=4, max_hosts=2)
    yield made
    await made.close()


@pytest.fixture
async def successor(tmp_path, environment):
    made = NicedBackend(tmp_path, environments=[environment], slots=4, max_hosts=2)
    yield made
    await made.close()


class TestNicedBackend(suite.BackendSuite):
    """Hosts come, are told apart, go, and are found again."""


class TestNicedTrial(suite.TrialSuite):
    """Commands in them are held."""

    @pytest.fixture
    def environment(self):
        return f"{SUITE.with_name('trial.py')}:Trial"
