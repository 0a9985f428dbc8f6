"""The embedded engine: sampled tokens and requests per second over HTTP, beside its scheduler driven without HTTP.

Load: 64 episodes at a time, each 3 or 4 turns of 9 to 18 sampled tokens with 15 tokens appended between turns, behind
a system prompt of 110 tokens that all share: the stockroom's shape. One thread for the engine, the client on another.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from envfarm.core.engine import GenerateRequest, SamplingParams
from envfarm.core.errors import ConfigError
from envfarm.inference.pool import EnginePool

EPISODES = 256
CONCURRENT = 64
VOCAB = 448


class Episode:
    """One episode's prompts: what is asked at each turn, given what was answered."""

    def __init__(self, index: int) -> None:
        self._random = random.Random(index)
        shared, group = random.Random(-1), random.Random(-2 - index // 8)
        self.key = f"episode-{index}"
        self.ids = [shared.randrange(VOCAB) for _ in range(110)] + [group.randrange(VOCAB) for _ in range(20)]
        self.turns = self._random.choice((3, 4))
        self.seed = index

    def new_tokens(self) -> int:
        """How many tokens to sample at the next turn."""
        return self._random.randint(9, 18)

    def answered(self, output_ids: list[int]) -> None:
        """Append what was sampled and what the environment says to it."""
        self.ids = [*self.ids, *output_ids, *(self._random.randrange(VOCAB) for _ in range(15))]


def measure() -> dict[str, float | str]:
    """Figures of the shipped tiny policy, or of a random model of its shape where none ships."""
    with _model() as (folder, name):
        with _engine(folder) as (address, process):
            figures = asyncio.run(_over_http(address, process))
            figures["engine_rss_mib"] = process.memory_info().rss / 2**20
        return {"engine_model": name, **figures, **_without_http(folder)}


async def _over_http(address: str, process: psutil.Process) -> dict[str, float | str]:
    tokens = requests = 0
    latencies: list[float] = []
    admitted = asyncio.Semaphore(CONCURRENT)

    async def run(pool: EnginePool, episode: Episode) -> None:
        nonlocal tokens, requests
        async with admitted:
            for turn in range(episode.turns):
                sampling = SamplingParams(max_new_tokens=episode.new_tokens(), sampling_seed=episode.seed)
                request = GenerateRequest(
                    rid=f"{episode.key}-{turn}", input_ids=episode.ids, sampling=sampling, routing_key=episode.key
                )
                began = time.perf_counter()
                generation = await pool.generate(request, timeout=60)
                latencies.append(time.perf_counter() - began)
                tokens += len(generation.output_ids)
                requests += 1
                episode.answered(generation.output_ids)

    async with EnginePool([address]) as pool:
        for index in range(8):
            await run(pool, Episode(10_000 + index))  # warm up
        tokens = requests = 0
        latencies.clear()
        cpu = _cpu(process)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for index in range(EPISODES):
                group.create_task(run(pool, Episode(index)))
        seconds = time.perf_counter() - began
    latencies.sort()
    return {
        "tokens_per_s": tokens / seconds,
        "requests_per_s": requests / seconds,
        "engine_tokens_per_cpu_s": tokens / (_cpu(process) - cpu),
        "engine_cpu_s_per_128_episodes": (_cpu(process) - cpu) * 128 / EPISODES,
        "engine_turn_p50_ms": latencies[len(latencies) // 2] * 1e3,
        "engine_turn_p99_ms": latencies[int(len(latencies) * 0.99)] * 1e3,
    }


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _without_http(folder: Path) -> dict[str, float]:
    """Tokens per second of the scheduler alone, in this process: the ceiling that HTTP cannot pass."""
    import torch

    from envfarm.inference.embedded.request import Request
    from envfarm.inference.embedded.serve import EngineSettings, load

    threads = torch.get_num_threads()
    scheduler = load(EngineSettings(model=folder, context=1024))

    def ask(episode: Episode, turn: int) -> None:
        scheduler.add(
            Request(
                rid=f"{episode.key}-{turn}",
                key=episode.key,
                tokens=np.array(episode.ids),
                max_new_tokens=episode.new_tokens(),
                temperature=1.0,
                top_p=1.0,
                top_k=-1,
                stops=(),
                seed=episode.seed,
                context=(episode, turn),
            )
        )

    waiting = [Episode(index) for index in range(EPISODES)]
    for _ in range(CONCURRENT):
        ask(waiting.pop(), 0)
    tokens = 0
    began, cpu = time.perf_counter(), time.thread_time()
    while not scheduler.idle:
        for done in scheduler.step():
            tokens += len(done.output_ids)
            episode, turn = done.context
            episode.answered(done.output_ids)
            if turn + 1 < episode.turns:
                ask(episode, turn + 1)
            elif waiting:
                ask(waiting.pop(), 0)
    seconds, cpu = time.perf_counter() - began, time.thread_time() - cpu
    torch.set_num_threads(threads)
    return {"engine_scheduler_tokens_per_s": tokens / seconds, "engine_scheduler_tokens_per_cpu_s": tokens / cpu}


@contextlib.contextmanager
def _engine(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    with tempfile.TemporaryDirectory() as scratch:
        address_file = Path(scratch, "address")
        code = "import typer; from envfarm.inference.command import engine; typer.run(engine)"
        arguments = ["--model", str(folder), "--address-file", str(address_file), "--context", "1024"]
        process = subprocess.Popen([sys.executable, "-c", code, *arguments])
        try:
            deadline = time.monotonic() + 120
            while not address_file.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ConfigError("the engine did not start; its log is above")
                time.sleep(0.05)
            yield address_file.read_text(), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(20)


@contextlib.contextmanager
def _model() -> Iterator[tuple[Path, str]]:
    from envfarm.inference import policies

    shipped = [name for name in policies.names() if not name.startswith("smollm2")]
    if shipped:
        yield policies.shipped(shipped[0]), shipped[0]
        return
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        config = Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            tie_word_embeddings=True,
            max_position_embeddings=2048,
        )
        Qwen3ForCausalLM(config).save_pretrained(folder)
        yield Path(folder), "random Qwen3 of the tiny policy's shape"
