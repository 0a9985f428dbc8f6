"""What tests in several folders need: a Docker Engine, and a host image of this checkout."""

import fcntl
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

BASE_IMAGE = os.environ.get("BASE_IMAGE", "debian-python:bookworm")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def docker_engine():
    """A client of the engine of this machine; skips where none answers."""
    docker = pytest.importorskip("docker")
    try:
        client = docker.APIClient(version="auto", timeout=60)
        client.ping()
    except docker.errors.DockerException as error:
        pytest.skip(f"needs a Docker Engine: {error}")
    yield client
    client.close()


@pytest.fixture(scope="session")
def host_image(docker_engine):
    """Name of a host image made of this checkout, or what HOST_IMAGE says; skips where its base is missing."""
    if os.environ.get("HOST_IMAGE"):
        return os.environ["HOST_IMAGE"]
    if not docker_engine.images(BASE_IMAGE):
        pytest.skip(f"needs the image {BASE_IMAGE}: make it with sandboxes/images/base, or set BASE_IMAGE")
    with Path(tempfile.gettempdir(), "envfarm-host-image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run(
            ["sh", "sandboxes/images/build", "host"],
            cwd=ROOT,
            env={**os.environ, "TAG": "test", "BASE_IMAGE": BASE_IMAGE},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
    assert made.returncode == 0, made.stderr
    return "envfarm-host:test"
