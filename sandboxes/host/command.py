"""``envfarm host``: one host process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from envfarm.core.sandbox import Isolation


def host(
    host_id: Annotated[str, typer.Option("--id", help="Id that the backend knows it by. Default: a fresh one.")] = "",
    listen: Annotated[str, typer.Option(help="unix:/path (with {id} for the id) or HOST:PORT (port 0: any).")] = (
        "127.0.0.1:0"
    ),
    slots: Annotated[int, typer.Option(min=1, help="Episodes at once.")] = 64,
    environment: Annotated[
        list[str] | None,
        typer.Option(help="Name, name/parameter, module:Class or file.py:Class.", envvar="ENVFARM_ENVIRONMENT"),
    ] = None,
    address_file: Annotated[Path | None, typer.Option(help="File for the address, written when it serves.")] = None,
    lease: Annotated[float, typer.Option(min=0.1, help="Seconds without a gateway until it ends itself.")] = 60.0,
    inside: Annotated[Isolation, typer.Option(help="What this host itself runs in: container, pod or none.")] = (
        Isolation.NONE
    ),
    image: Annotated[str, typer.Option(help="Name of the image that commands see as their root.")] = "",
    reload: Annotated[
        bool, typer.Option(help="End when the code of the environments changes, to be started anew with it.")
    ] = False,
    root: Annotated[Path | None, typer.Option(help="Folder with the files of that image.")] = None,
) -> None:
    """Serve environments and their tools to a gateway."""
    from envfarm.core.ids import new_id
    from sandboxes.host.server import HostSettings, run
    from sandboxes.isolation.surroundings import surroundings

    host_id = host_id or new_id("host")
    settings = HostSettings(
        id=host_id,
        listen=listen.replace("{id}", host_id),
        slots=slots,
        environments=tuple(environment or ()),
        address_file=address_file,
        lease=lease,
        reload=reload,
        surroundings=surroundings(inside=inside, image=image, root=root),
    )
    status = run(settings)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads inside hanging environment code must not hold the exit
