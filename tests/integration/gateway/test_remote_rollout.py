"""A rollout in a farm that runs already, and what it says when nobody there works for it."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from envfarm.cli import rollout_remote
from envfarm.cli.rollout_run import RolloutSettings
from envfarm.core.errors import DeadlineExceeded


async def test_a_farm_without_workers_is_told_soon_with_what_to_start(make_gateway, monkeypatch):
    gateway = make_gateway("--slots", "1").start()
    monkeypatch.setattr(rollout_remote, "WORKER_SECONDS", 1)
    settings = RolloutSettings(
        environment=gateway.flags[1],
        policy="stockroom",
        count=1,
        split="train",
        seed=0,
        temperature=1.0,
        out=Path("unused"),
        engines=(),
        concurrency=1,
        max_tokens=None,
        train_steps=0,
        trainer_ranks=1,
        gateway=gateway.address,
        token_file=gateway.state / "token",
    )
    with pytest.raises(DeadlineExceeded, match=r"no worker took an episode .*envfarm worker without --run"):
        await rollout_remote.run_remotely(settings, Console(file=io.StringIO()))
