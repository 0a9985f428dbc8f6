"""``envfarm hosts``: how the hosts of a running farm do, what is missing, why, and when it is tried again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from envfarm.core.pool import FarmStatus, HostStatus, PoolState, PoolStatus

_PIPE_WIDTH = 200
_COLOURS = {
    PoolState.READY: "green",
    PoolState.STARTING: "yellow",
    PoolState.SHORT: "yellow",
    PoolState.DOWN: "red",
}


def hosts(
    gateway: Annotated[str, typer.Option(help="Address of the gateway: host:port or unix:/path.")] = "127.0.0.1:50051",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the gateway's token: STATE/token of its --state.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show a gateway's pools of hosts: states, slots, quarantines, causes, and when what failed is tried again."""
    from envfarm.cli import foreground

    farm = foreground.run(_ask(gateway, token_file))
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    if as_json:
        console.print_json(json.dumps(msgspec.to_builtins(farm)))
    else:
        show(farm, console)


async def _ask(gateway: str, token_file: Path | None) -> FarmStatus:
    import asyncio

    from envfarm.core.errors import Unavailable
    from envfarm.wire.auth import read_token
    from envfarm.wire.channel import connect
    from envfarm.wire.farm_client import FarmClient

    token = await asyncio.to_thread(read_token, token_file)
    async with connect(gateway, token=token) as channel:
        try:
            return await FarmClient(channel).status()
        except Unavailable as error:
            raise Unavailable(
                f"no gateway answers at {gateway} ({error}); is it running, and is --gateway its address?"
            ) from error


def show(farm: FarmStatus, console: Console) -> None:
    """Print ``farm`` for a person."""
    table = Table(
        "image", "state", "host", "isolation", "busy", "waiting", "environments", box=None, padding=(0, 2, 0, 0)
    )
    for pool in farm.pools:
        _rows(table, pool)
    console.print(table)
    for pool in farm.pools:
        if pool.cause:
            again = f" (tried again in {pool.retry_in_s:.0f} s)" if pool.retry_in_s is not None else ""
            _tell(console, "red", _image(pool), pool.cause + again)
        for host in pool.hosts:
            for cause in host.quarantined:
                _tell(console, "yellow", host.id, f"in quarantine: {cause}")
    for held in farm.suspended:
        _tell(console, "red", held.environment, f"{held.cause} (opened again in {held.retry_in_s:.0f} s)")
    for broken in farm.broken:
        _tell(console, "red", "cannot be loaded", broken)
    for lost in farm.lost:
        _tell(console, "dim", "lost", lost.cause)


def _rows(table: Table, pool: PoolStatus) -> None:
    state = f"[{_COLOURS[pool.state]}]{pool.state.value}[/] {len(pool.hosts)}/{pool.wanted}"
    served = escape(", ".join(pool.environments))
    first: HostStatus | None = pool.hosts[0] if pool.hosts else None
    waiting = str(pool.waiting or "")
    table.add_row(escape(_image(pool)), state, *_cells(first), waiting, served)
    for host in pool.hosts[1:]:
        table.add_row("", "", *_cells(host), "", "")


def _cells(host: HostStatus | None) -> tuple[str, str, str]:
    if host is None:
        return "", "", ""
    foreign = "" if host.ours else " (another gateway's)"
    return f"{escape(host.id)}{foreign}", host.isolation.value, f"{host.busy}/{host.slots}"


def _image(pool: PoolStatus) -> str:
    return pool.image or "(the hosts' own system)"


def _tell(console: Console, colour: str, what: str, text: str) -> None:
    console.print(f"[{colour}]{escape(what)}[/]: {escape(text)}", highlight=False, soft_wrap=True)
