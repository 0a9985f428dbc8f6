"""A tiny policy, a real gateway with its log and its registry, and what a trainer needs to run inside a test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from envfarm.core.engine import EngineStatus
from envfarm.core.ids import new_id
from envfarm.core.log import LogRecord
from envfarm.core.messages import Diagnosis, Message
from envfarm.core.outcome import Outcome
from envfarm.core.run import Run, RunSettings
from envfarm.core.sandbox import Isolation
from envfarm.core.trajectory import Segment, StepRecord, Trajectory, TrajectoryHeader
from envfarm.trajectories.codec import decode, encode
from envfarm.wire.channel import connect
from envfarm.wire.log_client import LogClient
from envfarm.wire.run_client import RunClient
from trainer_bridge.learner import Learner
from trainer_bridge.orders import Learners
from trainer_bridge.ranks import Ranks
from trainer_bridge.settings import ComputeSettings, TrainSettings
from trainer_bridge.trainer import Trainer

VOCABULARY = 64
TEMPLATE = "{{ messages[0].content }}"


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of 30 thousand parameters with tied embeddings, and a file that is not weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("policy")
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def episode(
    run: Run, group: int, member: int, tokens: list[int], rewards: list[float | None], **fields: Any
) -> Trajectory:
    """An episode whose steps sampled equal shares of ``tokens`` after a prompt of three."""
    prompt = [1, 3, 4]
    logprobs = fields.pop("logprobs", None)
    version = fields.pop("version", 0)
    n, m = len(prompt), len(tokens)
    mask = np.array([0] * n + [1] * m, np.uint8)
    known = np.full(m, -np.log(VOCABULARY)) if logprobs is None else np.asarray(logprobs)
    steps = tuple(
        StepRecord(index=i, message=Message(role="assistant"), replies=(), diagnosis=Diagnosis.OK, parts={}, reward=r)
        for i, r in enumerate(rewards)
    )
    segment = Segment(
        token_ids=np.array(prompt + tokens, np.int32),
        mask=mask,
        logprobs=np.concatenate([np.full(n, np.nan), known]).astype(np.float32),
        versions=np.where(mask == 1, version, -1).astype(np.int32),
        steps=np.concatenate([np.full(n, -1), np.arange(m) * len(rewards) // max(1, m)]).astype(np.int32),
    )
    values: dict[str, Any] = {
        "id": new_id("episode"),
        "run_id": run.id,
        "group_id": f"{run.id}-{group}",
        "group_size": run.settings.group_size,
        "member": member,
        "attempt": 0,
        "final": True,
        "purpose": run.settings.purpose,
        "environment": "tiny@1",
        "split": "train",
        "task_id": str(group),
        "seed": 0,
        "policy": "tiny",
        "outcome": Outcome.completed(),
        "prompt": (),
        "segments": (segment,),
        "steps": steps,
        "reward": sum(r for r in rewards if r is not None),
        "catalogue": "",
        "isolation": Isolation.NONE,
        "started_at": 0.0,
        "ended_at": 1.0,
    }
    return Trajectory(**(values | fields))


@dataclass
class DiskEngine:
    """An engine that loads nothing but what it is told to, and remembers in which order."""

    version: int = 0
    loaded: list[tuple[int, Path]] = field(default_factory=list)
    before_update: Callable[[int], Any] | None = None

    async def update_weights_from_disk(self, path: str, *, version: int, timeout: float) -> None:
        if self.before_update is not None:
            await self.before_update(version)
        assert await asyncio.to_thread((Path(path) / "config.json").is_file)
        self.version = version
        self.loaded.append((version, Path(path)))

    async def status(self) -> list[EngineStatus]:
        return [EngineStatus(url="here", model_path="", version=self.version)]


@dataclass
class Farm:
    """A gateway process and clients of it; makes runs, episodes and trainers."""

    address: str
    token_file: Path
    runs: RunClient
    log: LogClient
    policy: Path

    async def run(self, **settings: Any) -> Run:
        values: dict[str, Any] = {"environment": "stockroom", "group_size": 4, "groups_per_version": 2, "staleness": 9}
        return await self.runs.create("test", RunSettings(**(values | settings)), new_id("request"))

    def episode(self, *args: Any, **fields: Any) -> Trajectory:
        return episode(*args, **fields)

    async def append(self, *trajectories: Trajectory) -> None:
        await self.log.append([LogRecord(header=TrajectoryHeader.of(t), payload=encode(t)) for t in trajectories])

    async def fill(self, run: Run, groups: int, *, first: int = 0, seed: int = 0) -> None:
        """Whole groups of random episodes, the same for the same seed."""
        generator = np.random.default_rng(seed)
        for group in range(groups):
            members = [
                self.episode(
                    run,
                    first + group,
                    member,
                    generator.integers(5, VOCABULARY, 6).tolist(),
                    generator.random(2).round(3).tolist(),
                )
                for member in range(run.settings.group_size)
            ]
            await self.append(*members)

    def settings(self, run: Run, out: Path, **fields: Any) -> TrainSettings:
        compute = ComputeSettings(micro_tokens=64, device="cpu")
        values: dict[str, Any] = {"run_id": run.id, "policy": self.policy, "out": out, "compute": compute}
        return TrainSettings(gateway=self.address, **(values | fields))

    def trainer(self, settings: TrainSettings, engine: DiskEngine | None = None) -> Trainer:
        ranks = Ranks(0, 1, device="cpu")
        learners = Learners(Learner(settings, ranks), ranks)
        return Trainer(settings, learners=learners, groups=self.log, runs=self.runs, engine=engine, decode=decode)

    def command(self, run: Run, out: Path, *flags: str) -> list[str]:
        """Command line of ``envfarm train``."""
        words = ["--run", run.id, "--policy", str(self.policy), "--out", str(out), "--gateway", self.address]
        return [*ENVFARM, "train", *words, "--token-file", str(self.token_file), "--device", "cpu", *flags]


ENVFARM = [sys.executable, "-m", "envfarm.cli.main"]


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A gateway process: (address, token file)."""
    state = tmp_path_factory.mktemp("gateway")
    address, output = state / "address", state / "output"
    argv = [*ENVFARM, "gateway", "--state", str(state), "--listen", "127.0.0.1:0", "--environment", "stockroom"]
    with output.open("wb") as sink:
        process = subprocess.Popen([*argv, "--address-file", str(address)], stdout=sink, stderr=sink)
    try:
        for _ in range(1200):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
                raise AssertionError(output.read_text())
            if address.exists():
                break
        yield address.read_text().strip(), state / "token"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@pytest.fixture
async def farm(gateway: tuple[str, Path], tiny_policy: Path) -> Any:
    address, token_file = gateway
    channel = connect(address, token=token_file.read_text().strip())
    async with LogClient(channel) as log:
        yield Farm(address, token_file, RunClient(channel), log, tiny_policy)
    await channel.close()


@pytest.fixture
def disk_engine() -> type[DiskEngine]:
    return DiskEngine


@pytest.fixture
def weights_in() -> Callable[[Path], dict[str, torch.Tensor]]:
    """Weights of a policy folder by name."""

    def read(folder: Path) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(folder / "model.safetensors")

    return read


@pytest.fixture
def lines_in() -> Callable[[Path], list[dict[str, Any]]]:
    """Lines of a trainer's ``metrics.jsonl``."""
    return lambda out: [msgspec.json.decode(line) for line in (out / "metrics.jsonl").read_bytes().splitlines()]


@pytest.fixture
def one_thread() -> dict[str, str]:
    """Environment of child processes that must not take all cores."""
    return os.environ | {"OMP_NUM_THREADS": "1"}
