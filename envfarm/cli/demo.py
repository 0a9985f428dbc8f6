"""``envfarm demo``: train a small policy on one machine, through every part of the farm."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from envfarm.cli import foreground
from envfarm.core.errors import ConfigError

Seconds = Annotated[float, typer.Option("--seconds", min=20, help="Stop after this long, all told.")]
Out = Annotated[
    Path | None, typer.Option("--out", help="Folder for everything the run makes [default: .envfarm/demo-TIME].")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result to this file as JSON.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of tasks, sampling and minibatches.")]
Ranks = Annotated[int, typer.Option("--trainer-ranks", min=1, max=8, help="FSDP2 ranks of the trainer (gloo).")]
Shuffle = Annotated[
    bool,
    typer.Option(
        "--shuffle-rewards", help="Negative control: deal the rewards to the wrong episodes; nothing is learnt."
    ),
]


def demo(
    seconds: Seconds = 180.0,
    out: Out = None,
    json_file: Json = None,
    seed: Seed = 0,
    trainer_ranks: Ranks = 1,
    shuffle_rewards: Shuffle = False,
) -> None:
    """Train a small tool-using policy through every part of the farm, on this machine.

    Starts a gateway with a sandbox host, the embedded inference engine, a rollout worker and a torch FSDP2 trainer as
    processes of their own, and trains on the environment `stockroom`. The policy that ships with envfarm knows the
    tools but carries a bad habit (it skips the arithmetic and answers with the last number it saw); reinforcement
    learning removes it. Success is measured at temperature 1 on held-out tasks, before and after; when to stop is
    decided on a validation split.
    """
    from envfarm.cli.demo_run import DemoSettings, run_demo

    folder = (out or Path(".envfarm") / time.strftime("demo-%Y%m%d-%H%M%S")).resolve()
    if (folder / "farm.db").exists():
        raise ConfigError(f"{folder} holds an earlier run; choose another --out, or remove it")
    if json_file is not None and not json_file.resolve().parent.is_dir():
        raise ConfigError(f"--json {json_file}: the folder {json_file.resolve().parent} does not exist")
    if json_file is not None and json_file.is_dir():
        raise ConfigError(f"--json {json_file} is a folder; give a file in it")
    settings = DemoSettings(
        out=folder, seconds=seconds, seed=seed, trainer_ranks=trainer_ranks, shuffle_rewards=shuffle_rewards
    )
    console = Console()
    result = foreground.run(run_demo(settings, console))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n")
