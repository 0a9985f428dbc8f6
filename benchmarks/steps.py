"""Steps per second through gateway and host, beside a bare echo; opening of 64 episodes; memory of the gateway.

One client process, one step in flight per episode, a real tool call: text parsed, arguments validated, tool run in the
host, five reward parts computed. The echo has the same client loop and one hop less. Each figure is the median of
``ROUNDS`` rounds, echo and farm in turn, so that a drift of the machine's speed meets both.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import psutil

from benchmarks.echo import EchoClient
from envfarm.cli.local_farm import LocalFarm, local_farm
from envfarm.core.episode import Opened, TextAction
from envfarm.core.ids import new_id
from envfarm.core.task import Task
from envfarm.wire.episode_client import EpisodeClient

ROUNDS = 3
SECONDS = 2.0
TEXT = '<tool_call>\n{"name": "add", "arguments": {"amount": 3}}\n</tool_call>'
ENVIRONMENT = f"{Path(__file__).parent / 'counter.py'}:Counter"
Step = Callable[[int], Awaitable[object]]


def measure() -> dict[str, float]:
    """All figures of this part."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        return asyncio.run(_measure(Path(scratch)))


async def _measure(state: Path) -> dict[str, float]:
    figures: dict[str, list[float]] = {}
    async with (
        local_farm(state, environments=[ENVIRONMENT], policy=None, slots=2100) as farm,
        EpisodeClient(farm.channel) as client,
        _echo() as echo,
    ):
        figures["gateway_mib_idle"] = [_gateway_mib(farm)]
        for _ in range(ROUNDS):
            for episodes in (1, 64, 256):
                steps = [_echo_step(echo) for _ in range(episodes)]
                rate, _ = await _rate(steps)
                figures.setdefault(f"echo_steps_per_s_{episodes}", []).append(rate)
                opened, seconds = await _open(client, episodes)
                if episodes == 64:
                    figures.setdefault("open_p50_ms_64", []).append(statistics.median(seconds) * 1e3)
                rate, latencies = await _rate([_farm_step(client, o) for o in opened])
                figures.setdefault(f"steps_per_s_{episodes}", []).append(rate)
                figures.setdefault(f"step_p50_ms_{episodes}", []).append(statistics.median(latencies) * 1e3)
                if episodes == 256:
                    figures.setdefault("gateway_mib_256_open", []).append(_gateway_mib(farm))
                await _close(client, opened)
        opened, _ = await _open(client, 2000)
        await _rate([_farm_step(client, o) for o in opened])
        figures["gateway_mib_2000_open"] = [_gateway_mib(farm)]
        await _close(client, opened)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    for episodes in (1, 64, 256):
        ratio = medians[f"steps_per_s_{episodes}"] / medians[f"echo_steps_per_s_{episodes}"]
        medians[f"steps_over_echo_{episodes}"] = ratio
    return medians


async def _rate(steps: list[Step]) -> tuple[float, list[float]]:
    """Steps per second and latencies in seconds, every episode stepping as fast as it can for ``SECONDS``."""
    latencies: list[float] = []
    end = time.perf_counter() + SECONDS

    async def episode(step: Step) -> None:
        index = 0
        while (began := time.perf_counter()) < end:
            await step(index)
            latencies.append(time.perf_counter() - began)
            index += 1

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for step in steps:
            group.create_task(episode(step))
    return len(latencies) / (time.perf_counter() - began), latencies


def _echo_step(echo: EchoClient) -> Step:
    return lambda index: echo.step(index, TEXT)


def _farm_step(client: EpisodeClient, opened: Opened) -> Step:
    action = TextAction(format="hermes", text=TEXT)
    return lambda index: client.step(opened.handle, index, action, sampled_tokens=14, timeout=30.0)


async def _open(client: EpisodeClient, count: int) -> tuple[list[Opened], list[float]]:
    """Open ``count`` episodes at once; returns them with the seconds each took."""

    async def one() -> tuple[Opened, float]:
        began = time.perf_counter()
        opened = await client.open(
            environment=ENVIRONMENT, task=Task(id="0", prompt="Count."), seed=1, request_id=new_id("open"), timeout=60.0
        )
        return opened, time.perf_counter() - began

    results = await asyncio.gather(*(one() for _ in range(count)))
    return [opened for opened, _ in results], [seconds for _, seconds in results]


async def _close(client: EpisodeClient, opened: list[Opened]) -> None:
    await asyncio.gather(*(client.close(o.handle) for o in opened))


def _gateway_mib(farm: LocalFarm) -> float:
    return psutil.Process(farm.processes.pid("gateway")).memory_info().rss / 2**20


@contextlib.asynccontextmanager
async def _echo() -> AsyncIterator[EchoClient]:
    """An echo server in a process of its own, and a client of it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.echo", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        address = (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
        async with grpc.aio.insecure_channel(address) as channel:
            await asyncio.wait_for(channel.channel_ready(), 30)
            client = EchoClient(channel)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(client.write()), group.create_task(client.read())]
                try:
                    yield client
                finally:
                    for task in tasks:
                        task.cancel()
    finally:
        process.kill()
        await process.wait()
