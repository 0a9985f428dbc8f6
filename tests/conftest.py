"""What tests in several folders need: a Docker Engine, and a host image of this checkout."""

import contextlib
import fcntl
import hashlib
import importlib
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

BASE_IMAGE = os.environ.get("BASE_IMAGE", "debian-python:bookworm")
ROOT = Path(__file__).parents[1]
TEST_IMAGE = "envfarm-host:test"
MADE_OF = "envfarm.made-of"


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
    """Name of a host image made of this checkout, or what HOST_IMAGE says; skips where its base is missing.

    It is made once for all processes of a run, and not at all when the last one was made of the same files.
    """
    if os.environ.get("HOST_IMAGE"):
        return os.environ["HOST_IMAGE"]
    if not docker_engine.images(BASE_IMAGE):
        pytest.skip(f"needs the image {BASE_IMAGE}: make it with sandboxes/images/base, or set BASE_IMAGE")
    with Path(tempfile.gettempdir(), "envfarm-host-image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made_of = _tree(docker_engine.inspect_image(BASE_IMAGE)["Id"])
        if _label(docker_engine, TEST_IMAGE) != made_of:
            before = set(docker_engine.images(all=True, quiet=True))
            replaced = {image["Id"] for image in docker_engine.images(TEST_IMAGE)}
            try:
                _build(made_of)
            finally:
                _remove_stages(docker_engine, before - replaced)
    return TEST_IMAGE


def _build(made_of):
    made = subprocess.run(
        ["sh", "sandboxes/images/build", "host"],
        cwd=ROOT,
        env={
            **os.environ,
            "TAG": TEST_IMAGE.partition(":")[2],
            "BASE_IMAGE": BASE_IMAGE,
            "DOCKER_BUILD_FLAGS": f"--force-rm --label {MADE_OF}={made_of}",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert made.returncode == 0, made.stderr


def _tree(base):
    """Digest of everything that goes into the image."""
    found = hashlib.blake2b(base.encode(), digest_size=16)
    for place in ("pyproject.toml", "README.md", "LICENSE", "envfarm", "sandboxes", "rewards", "trainer_bridge"):
        files = sorted((ROOT / place).rglob("*")) if (ROOT / place).is_dir() else [ROOT / place]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                found.update(f"{file.relative_to(ROOT)} {file.stat().st_mode}\0".encode() + file.read_bytes() + b"\0")
    for wheel in sorted((ROOT / "wheels").rglob("*.whl")):
        found.update(f"{wheel.relative_to(ROOT)} {wheel.stat().st_size}\0".encode())
    return found.hexdigest()


def _label(engine, name):
    found = engine.images(name)
    return (found[0].get("Labels") or {}).get(MADE_OF) if found else None


def _remove_stages(engine, before):
    """Remove what the build left without a name: its other stages, and the image that had the name before."""
    for image in engine.images(filters={"dangling": True}, quiet=True):
        if image not in before:
            with contextlib.suppress(_engine_errors()):  # another build stands on it
                engine.remove_image(image)


def _engine_errors():
    """What the engine's client raises."""
    return importlib.import_module("docker.errors").APIError
