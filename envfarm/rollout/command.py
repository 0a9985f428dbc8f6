"""``envfarm worker``: runs episodes of one run as a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from envfarm.core.errors import ConfigError


def worker(
    gateway: Annotated[str, typer.Option(help="address of the gateway: host:port or unix:/path")],
    engine: Annotated[list[str], typer.Option(help="URL of an inference engine; may be given several times")],
    tokenizer: Annotated[
        str, typer.Option(help="policy folder (tokenizer.json, chat template, generation config), or a policy's name")
    ],
    run: Annotated[str, typer.Option(help="id of the run to work for; default: every run, as they come")] = "",
    token_file: Annotated[Path | None, typer.Option(help="file with the gateway's token")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="most episodes that run at once")] = 128,
    name: Annotated[str, typer.Option(help="name of this worker, unlike any other's; default: machine and pid")] = "",
    renderer: Annotated[str, typer.Option(help="auto, template, or a format of the library renderers")] = "auto",
    policy_name: Annotated[str, typer.Option(help="name of the policy in trajectories; default: the folder's")] = "",
    grace: Annotated[float, typer.Option(min=0, help="seconds that episodes get to end on SIGTERM")] = 20.0,
) -> None:
    """Run episodes: tokens in, tokens out. SIGTERM lets running episodes end, then aborts and records them."""
    import asyncio
    import logging
    import os
    import socket

    try:
        from envfarm.inference.policies import folder_of
        from envfarm.rollout.serve import WorkerSettings, serve
    except ImportError as error:
        raise ConfigError(f"a rollout worker needs {error.name}: pip install 'envfarm[worker]'") from error
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = WorkerSettings(
        gateway=gateway,
        run_id=run,
        engines=tuple(engine),
        folder=folder_of(tokenizer),
        token_file=token_file,
        concurrency=concurrency,
        name=name or f"{socket.gethostname()}-{os.getpid()}",
        renderer=renderer,
        policy_name=policy_name,
        grace_s=grace,
    )
    asyncio.run(serve(settings))
