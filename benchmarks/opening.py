"""Opening 64 episodes at once, first and after 64 were closed: an environment that runs no code, and one that does.

Seconds are a client's, through gateway and host. Of the second environment every episode runs one command before it is
closed, so that its slot has to be emptied, proven clean and prepared again.
"""

from __future__ import annotations

import asyncio
import statistics
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
_CALL = AssistantMessage(tool_calls=(ToolCall("call_0", "run", '{"amount": 1}'),), diagnosis=Diagnosis.OK)
_FILE = Path(__file__).parent / "counter.py"


def measure() -> dict[str, float]:
    """All figures of this part."""
    figures: dict[str, float] = {}
    for label, name in (("plain", f"{_FILE}:Counter"), ("executing", f"{_FILE}:Runner")):
        with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
            for key, values in asyncio.run(_measure(Path(scratch), name)).items():
                figures[f"{label}_{key}"] = statistics.median(values) * 1e3
    return figures


async def _measure(state: Path, name: str) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {}
    async with (
        local_farm(state, environments=[name], policy=None, slots=EPISODES) as farm,
        EpisodeClient(farm.channel) as client,
    ):
        for number in range(ROUNDS):
            opened, seconds = await _open(client, name)
            when = "first" if number == 0 else "again"
            figures.setdefault(f"open_p50_ms_{when}", []).append(statistics.median(seconds))
            figures.setdefault(f"open_max_ms_{when}", []).append(max(seconds))
            if name.endswith("Runner"):
                await asyncio.gather(*(client.step(o.handle, 0, _CALL, timeout=60.0) for o in opened))
            began = time.perf_counter()
            await asyncio.gather(*(client.close(o.handle, timeout=60.0) for o in opened))
            figures.setdefault("close_all_ms", []).append(time.perf_counter() - began)
    return figures


async def _open(client: EpisodeClient, name: str) -> tuple[list[Opened], list[float]]:
    (task, *_) = await client.tasks(name, "train", 0, 1)

    async def one() -> tuple[Opened, float]:
        began = time.perf_counter()
        opened = await client.open(environment=name, task=task, seed=1, request_id=new_id("open"), timeout=60.0)
        return opened, time.perf_counter() - began

    results = await asyncio.gather(*(one() for _ in range(EPISODES)))
    return [opened for opened, _ in results], [seconds for _, seconds in results]
