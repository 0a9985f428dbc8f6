"""``envfarm gateway``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def gateway(
    state: Annotated[Path, typer.Option(help="Folder of token, key and database; made when missing.")],
    listen: Annotated[str, typer.Option(help="HOST:PORT to serve at; port 0 is any free one.")] = "127.0.0.1:50051",
    backend: Annotated[str, typer.Option(help="What makes sandbox hosts: local, docker, attached.")] = "local",
    backend_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Option of the backend; repeat for more. A wrong one lists them."),
    ] = None,
    environment: Annotated[
        list[str] | None,
        typer.Option(
            help="Environment to serve; repeat for more. Default: every registered one.", envvar="ENVFARM_ENVIRONMENT"
        ),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Episodes that one host holds at once.")] = 256,
    hosts: Annotated[int, typer.Option(min=1, help="Hosts to keep, for each image that environments name.")] = 1,
    reload: Annotated[
        bool, typer.Option("--reload", help="Start hosts anew when environments' code changes (local, docker).")
    ] = False,
    address_file: Annotated[Path | None, typer.Option(help="Write the bound address here once serving.")] = None,
    keep_hosts: Annotated[bool, typer.Option(help="Leave hosts and episodes alive for the next gateway.")] = False,
    drain_seconds: Annotated[float, typer.Option(min=0, help="Time for steps in flight after SIGTERM.")] = 15.0,
) -> None:
    """Route episodes to sandboxes, compose rewards, take trajectories in.

    Clients show the token in STATE/token. SIGTERM drains: no new episodes, steps in flight finish. Nothing is lost when
    it is killed: episodes live in their hosts, trajectories and runs in STATE/farm.db.
    """
    import asyncio
    import logging
    import sys

    from envfarm.gateway.server import GatewaySettings, run

    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    )
    settings = GatewaySettings(
        listen=listen,
        state=state,
        backend=backend,
        backend_options=(*(backend_option or ()), *(["reload=true"] if reload else [])),
        environments=tuple(environment or ()),
        slots=slots,
        hosts=hosts,
        address_file=address_file,
        keep_hosts=keep_hosts,
        drain_seconds=drain_seconds,
    )
    asyncio.run(run(settings))
