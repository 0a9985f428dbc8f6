"""``envfarm rollout``: let a policy act in an environment, look at what it does, keep the trajectories."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from envfarm.cli import foreground

_PIPE_WIDTH = 200  # a table that nobody looks at in a terminal is not cut

Env = Annotated[str, typer.Option("--env", help="Registered environment, module:Class, or file.py:Class.")]
Policy = Annotated[
    str, typer.Option("--policy", help="Hugging Face folder, or one of: stockroom, smollm2-135m.", show_default=True)
]
Count = Annotated[int, typer.Option("-n", "--count", min=1, help="Episodes, one per task.")]


def rollout(
    env: Env,
    policy: Policy = "stockroom",
    count: Count = 16,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "train",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for state and logs [default: .envfarm/rollout-TIME].")
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", help="URL of a running SGLang server or engine; else one is started."),
    ] = None,
    backend: Annotated[str, typer.Option(help="What makes the sandbox host: local, docker, attached.")] = "local",
    backend_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Option of the backend; repeat for more. A wrong one lists them."),
    ] = None,
    gateway: Annotated[
        str | None,
        typer.Option("--gateway", help="HOST:PORT of a running farm; its workers run the episodes unless --engine."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with that gateway's token (STATE/token there).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead of a table.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes at once.")] = 16,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens per step, below the environment's own limit.")
    ] = None,
    train_steps: Annotated[int, typer.Option(min=0, help="Training steps to take on the trajectories afterwards.")] = 0,
    trainer_ranks: Annotated[int, typer.Option(min=1, max=8, help="FSDP2 ranks of those steps.")] = 1,
) -> None:
    """Run episodes with a policy, print what became of each, and store the trajectories.

    Starts a gateway with a host and (without --engine) the embedded engine for the time of the command. The
    trajectories end up in OUT/farm.db. With --train-steps the trainer then takes steps on them.

    With --gateway nothing is started: the episodes run in that farm, and the trajectories stay in its log.
    """
    from envfarm.cli.rollout_remote import run_remotely
    from envfarm.cli.rollout_run import RolloutSettings, run_rollout
    from envfarm.cli.rollout_table import as_row, table

    folder = (out or Path(".envfarm") / time.strftime("rollout-%Y%m%d-%H%M%S")).resolve()
    settings = RolloutSettings(
        environment=env,
        policy=policy,
        count=count,
        split=split,
        seed=seed,
        temperature=temperature,
        out=folder,
        engines=tuple(engine or ()),
        concurrency=concurrency,
        max_tokens=max_tokens,
        train_steps=train_steps,
        trainer_ranks=trainer_ranks,
        backend=backend,
        backend_options=tuple(backend_option or ()),
        gateway=gateway or "",
        token_file=token_file,
    )
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    progress = Console(stderr=True)
    run_id, trajectories = foreground.run((run_remotely if gateway else run_rollout)(settings, progress))
    if as_json:
        for trajectory in trajectories:
            console.print(json.dumps(as_row(trajectory)), highlight=False, soft_wrap=True)
        return
    console.print(table(trajectories))
    where = f"the log of {gateway}" if gateway else f"{folder}/farm.db"
    console.print(f"run {run_id}; trajectories in {where}", highlight=False, soft_wrap=True)
