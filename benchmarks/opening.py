"""Opening 64 episodes at once, first and after 64 were closed: an environment that runs no code, and one that does.

Milliseconds are a client's, through gateway and host. Of the second environment every episode runs one command before
it is closed, so that its slot has to be emptied, proven clean and prepared again; and one episode alone runs many, each
a step. With hosts that are processes, and with hosts in containers where a Docker Engine has the image of hosts.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from envfarm.cli.local_farm import local_farm
from envfarm.core.episode import Opened
from envfarm.core.ids import new_id
from envfarm.core.messages import AssistantMessage, Diagnosis, ToolCall
from envfarm.wire.episode_client import EpisodeClient

EPISODES = 64
ROUNDS = 5
COMMANDS = 100
HOST_IMAGE = "envfarm-host:latest"
_CALL = AssistantMessage(tool_calls=(ToolCall("call_0", "run", '{"amount": 1}'),), diagnosis=Diagnosis.OK)
_FILE = Path(__file__).parent / "counter.py"


def measure() -> dict[str, float | str]:
    """All figures of this part."""
    figures: dict[str, float | str] = {}
    for backend in ("local", "docker"):
        if backend == "docker" and not _docker_hosts():
            figures["docker"] = f"no Docker Engine, or no image {HOST_IMAGE} (make images)"
            continue
        for label, name in (("plain", f"{_FILE}:Counter"), ("executing", f"{_FILE}:Runner")):
            with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
                for key, values in asyncio.run(_measure(Path(scratch), name, backend)).items():
                    figures[f"{backend}_{label}_{key}"] = statistics.median(values) * 1e3
    return figures


def _docker_hosts() -> bool:
    docker = shutil.which("docker")
    if docker is None:
        return False
    found = subprocess.run([docker, "image", "inspect", HOST_IMAGE], capture_output=True, check=False)
    return found.returncode == 0


async def _measure(state: Path, name: str, backend: str) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {}
    began = time.perf_counter()
    async with (
        local_farm(state, environments=[name], policy=None, slots=EPISODES, backend=backend) as farm,
        EpisodeClient(farm.channel) as client,
    ):
        figures["farm_start_ms"] = [time.perf_counter() - began]
        for number in range(ROUNDS):
            opened, seconds = await _open(client, name)
            when = "first" if number == 0 else "again"
            figures.setdefault(f"open_p50_ms_{when}", []).append(statistics.median(seconds))
            figures.setdefault(f"open_max_ms_{when}", []).append(max(seconds))
            if name.endswith("Runner"):
                await asyncio.gather(*(client.step(o.handle, 0, _CALL, timeout=60.0) for o in opened))
                alone = sorted([await _step(client, opened[0], 1 + index) for index in range(COMMANDS)])
                figures.setdefault("command_p50_ms", []).append(statistics.median(alone))
                figures.setdefault("command_p99_ms", []).append(alone[int(COMMANDS * 0.99)])
            began = time.perf_counter()
            await asyncio.gather(*(client.close(o.handle, timeout=60.0) for o in opened))
            figures.setdefault("close_all_ms", []).append(time.perf_counter() - began)
    return figures


async def _step(client: EpisodeClient, opened: Opened, index: int) -> float:
    began = time.perf_counter()
    answer = await client.step(opened.handle, index, _CALL, timeout=60.0)
    if answer.results[0].content != "1\n":
        raise ValueError(f"the command answered {answer.results[0].content!r}")
    return time.perf_counter() - began


async def _open(client: EpisodeClient, name: str) -> tuple[list[Opened], list[float]]:
    (task, *_) = await client.tasks(name, "train", 0, 1)

    async def one() -> tuple[Opened, float]:
        began = time.perf_counter()
        opened = await client.open(environment=name, task=task, seed=1, request_id=new_id("open"), timeout=60.0)
        return opened, time.perf_counter() - began

    results = await asyncio.gather(*(one() for _ in range(EPISODES)))
    return [opened for opened, _ in results], [seconds for _, seconds in results]
