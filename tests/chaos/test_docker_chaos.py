"""A gateway that is killed leaves no container behind: its hosts end by their lease, and their containers with them."""

import asyncio
import os
import signal
import sys

import pytest

pytest.importorskip("docker")

from sandboxes.docker.backend import DockerBackend

pytestmark = [pytest.mark.chaos, pytest.mark.docker, pytest.mark.xdist_group("docker")]
OWNER_OF_HOSTS = """
import asyncio, sys
from pathlib import Path
from envfarm.core.sandbox import SandboxProfile
from sandboxes.docker.backend import DockerBackend

async def main():
    state, image, lease = sys.argv[1:]
    backend = DockerBackend(
        Path(state),
        environments=["stockroom"],
        slots=2,
        max_hosts=2,
        lease=float(lease),
        host_image=image,
        pull="never",
    )
    for _ in range(2):
        await backend.acquire(SandboxProfile())
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def killed_owner(state, image, lease):
    """SIGKILL of a process that has two hosts; returns the name under which they go."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER_OF_HOSTS, str(state), image, str(lease), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(40):
        assert await process.stdout.readline() == b"ready\n"
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    return (state / "docker" / "owner").read_text().strip()


async def gone(engine, owner, seconds):
    async with asyncio.timeout(seconds):
        labels = {"label": f"envfarm.owner={owner}"}
        while engine.containers(all=True, filters=labels):  # noqa: ASYNC110 - from outside there is only asking
            await asyncio.sleep(0.1)


async def test_hosts_of_a_killed_gateway_end_with_their_containers(host_image, docker_engine, tmp_path):
    owner = await killed_owner(tmp_path, host_image, 3.0)
    await gone(docker_engine, owner, 60)


async def test_hosts_of_a_killed_gateway_are_adopted_by_the_next(host_image, docker_engine, tmp_path):
    await killed_owner(tmp_path, host_image, 30.0)
    backend = DockerBackend(
        tmp_path, environments=["stockroom"], slots=2, max_hosts=2, host_image=host_image, pull="never"
    )
    assert len(await backend.list()) == 2
    await backend.close()


async def test_a_new_gateway_clears_up_what_hung_while_nobody_was_there(host_image, docker_engine, tmp_path):
    owner = await killed_owner(tmp_path, host_image, 30.0)
    for container in docker_engine.containers(filters={"label": f"envfarm.owner={owner}"}):
        docker_engine.pause(container["Id"])
    backend = DockerBackend(
        tmp_path, environments=["stockroom"], slots=2, max_hosts=2, host_image=host_image, pull="never"
    )
    assert list(await backend.list()) == []
    await gone(docker_engine, owner, 1)
    await backend.close()
