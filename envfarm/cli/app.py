"""The commands of ``envfarm``, those of plugins included, and the sentences that their errors become."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from envfarm.cli.demo import demo
from envfarm.cli.doctor import doctor
from envfarm.cli.environments import environments
from envfarm.cli.hosts import hosts
from envfarm.cli.rollout import rollout
from envfarm.core import plugins
from envfarm.core.errors import FarmError
from envfarm.gateway.command import gateway
from envfarm.inference.command import engine
from envfarm.rollout.command import worker

app = typer.Typer(
    name="envfarm",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Agent-environment farm for tool-calling RL rollouts.\n\n"
    "Start with **envfarm demo**: it trains a small tool-using policy through every part of the farm on this "
    "machine. **envfarm doctor** says what this machine can do.",
)
app.command(rich_help_panel="Use")(demo)
app.command(rich_help_panel="Use")(rollout)
app.add_typer(environments, name="env", rich_help_panel="Use")
app.command(rich_help_panel="Use")(hosts)
app.command(rich_help_panel="Use")(doctor)
app.command(rich_help_panel="Serve: one process each")(gateway)
app.command(rich_help_panel="Serve: one process each")(engine)
app.command(rich_help_panel="Serve: one process each")(worker)


def _unavailable(name: str, error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise FarmError(f"the command {name!r} cannot be loaded: {type(error).__name__}: {error}")

    command.__doc__ = f"(cannot be loaded: {error})"
    return command


def _add_plugin_commands() -> None:
    panels = {"host": "Serve: one process each", "train": "Serve: one process each", "warmup": "Use"}
    for name in plugins.names("envfarm.commands"):
        command: Any
        try:
            command = plugins.load("envfarm.commands", name)
        except Exception as error:  # somebody's package is broken: its command says so, the others work
            command = _unavailable(name, error)
        panel = panels.get(name, "From plugins")
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel)(command)


_add_plugin_commands()


def _tell(error: FarmError) -> None:
    Console(stderr=True, soft_wrap=True).print(Text("envfarm: ", style="bold red") + Text(str(error)))


def _first_of_ours(group: BaseExceptionGroup[BaseException]) -> FarmError | None:
    """A task group wraps what went wrong in it; a person wants the sentence inside."""
    for error in group.exceptions:
        found = _first_of_ours(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, FarmError):
            return found
    return None


def run() -> int | str | None:
    """Run the command line; errors of the farm become one message on stderr. Returns the exit status."""
    try:
        app()
    except FarmError as error:
        _tell(error)
        return 1
    except BaseExceptionGroup as group:
        ours = _first_of_ours(group)
        if ours is None:
            raise
        _tell(ours)
        return 1
    except SystemExit as ended:
        return ended.code
    return 0
