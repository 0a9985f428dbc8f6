"""``envfarm env``: list environments, look at one, begin a new one, try one out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from envfarm.cli import foreground
from envfarm.cli.environment_check import Check, check_environment
from envfarm.core import plugins
from envfarm.core.environment import Environment, description
from envfarm.core.errors import ConfigError, FarmError
from envfarm.core.suggestions import did_you_mean
from envfarm.core.task import SPLITS
from envfarm.tools.schema import schemas

EXAMPLES = 3  # tasks shown of each split
environments = typer.Typer(no_args_is_help=True, help="List environments, look at one, begin a new one, try one out.")
Name = Annotated[str, typer.Argument(help="A registered name, module:Class, or file.py:Class.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@environments.command("list")
def list_environments(as_json: AsJson = False) -> None:
    """List the environments that are installed here."""
    rows = [_row(name) for name in plugins.names("envfarm.environments")]
    console = Console()
    if as_json:
        console.print_json(json.dumps(rows))
        return
    table = Table("name", "version", "tools", "what it is", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(row["name"], row["version"], ", ".join(row["tools"]), row["description"] or row["broken"])
    console.print(table)


def _row(name: str) -> dict[str, Any]:
    try:
        cls = plugins.environment(name)
        tools = [t.name for t in schemas(cls)]
    except Exception as error:  # loading runs user code, which may raise anything
        return {"name": name, "version": "?", "tools": [], "description": "", "broken": f"cannot be loaded: {error}"}
    return {"name": name, "version": cls.version, "tools": tools, "description": description(cls), "broken": ""}


@environments.command("show")
def show(name: Name, as_json: AsJson = False) -> None:
    """Show an environment's tools, limits, reward weights and first tasks."""
    cls = plugins.environment(name)
    facts = _facts(cls)
    console = Console()
    if as_json:
        console.print_json(json.dumps(facts))
        return
    console.print(f"[bold]{cls.name}@{cls.version}[/]  {description(cls)}\n", highlight=False)
    tools = Table("tool", "arguments", "ends", "what it does", box=None, padding=(0, 2, 0, 0))
    for tool in schemas(cls):
        arguments = msgspec.json.decode(tool.parameters).get("properties", {})
        tools.add_row(tool.name, ", ".join(arguments), "yes" if tool.ends else "", tool.description)
    console.print(tools)
    for title in ("limits", "reward", "profile"):
        values = ", ".join(f"{key} {value}" for key, value in facts[title].items())
        console.print(f"\n[bold]{title}[/]  {values or 'nothing special'}", highlight=False)
    for split, examples in facts["tasks"].items():
        console.print(f"\n[bold]{split}[/]")
        for example in examples:
            console.print(f"  {example['id']}  {example['prompt']}", highlight=False)


def _facts(cls: type[Environment]) -> dict[str, Any]:
    return {
        "name": cls.name,
        "version": cls.version,
        "description": description(cls),
        "tools": [msgspec.to_builtins(t) for t in schemas(cls)],
        "limits": msgspec.to_builtins(cls.limits),
        "reward": {
            "weights": cls.reward.weights,
            "caps": cls.reward.caps,
            "gamma": cls.reward.gamma,
        },
        "profile": msgspec.to_builtins(cls.profile),
        "tasks": {split: _examples(cls, split) for split in SPLITS},
    }


def _examples(cls: type[Environment], split: str) -> list[dict[str, Any]]:
    instance = cls()
    try:
        tasks = list(itertools.islice(instance.tasks(split), EXAMPLES))
    except Exception as error:  # user code
        raise ConfigError(f"{cls.__name__}.tasks({split!r}) raised {type(error).__name__}: {error}") from error
    return [{"id": task.id, "prompt": _prompt(instance, task)} for task in tasks]


def _prompt(instance: Environment, task: Any) -> str:
    first = instance.reset(task) if not task.prompt else task.prompt
    if isinstance(first, str):
        return first
    if isinstance(first, (list, tuple)):
        return " / ".join(m.content for m in first)
    close = getattr(first, "close", None)  # a coroutine: only a host runs it
    if close is not None:
        close()
    return "(made when the episode starts)"


@environments.command("new")
def new(
    name: Annotated[str, typer.Argument(help="Name in snake case, for example word_count.")],
    folder: Annotated[Path, typer.Option("--folder", help="Where to write NAME.py.")] = Path(),
) -> None:
    """Write a working environment of your own to begin from."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(f"{name!r} is not a name in snake case (letters, digits, underscores), like word_count")
    path = folder / f"{name}.py"
    if path.exists():
        raise ConfigError(f"{path} exists; choose another name or folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    class_name = "".join(word.capitalize() for word in name.split("_"))
    path.write_text(_TEMPLATE.format(class_name=class_name))
    console = Console()
    console.print(f"wrote {path}", highlight=False)
    console.print(f"try it:   envfarm env test {path}:{class_name}", highlight=False)
    console.print(f"look at:  envfarm env show {path}:{class_name}", highlight=False)


@environments.command("test")
def try_out(
    name: Name,
    as_json: AsJson = False,
    seconds: Annotated[float, typer.Option(help="Give up after this long.")] = 60.0,
) -> None:
    """Try an environment out in a real host: tasks, resets, every tool, bad input, rewards, repeatability."""
    with _scratch() as (scratch, tell):
        checks = foreground.run(_bounded(located(name), scratch, seconds))
        tell(" ".join(check.detail for check in checks))
    console = Console()
    if as_json:
        console.print_json(json.dumps([msgspec.to_builtins(c) for c in checks]))
    else:
        _print_checks(console, checks)
    if not all(c.ok for c in checks):
        raise FarmError(f"{sum(not c.ok for c in checks)} of {len(checks)} checks failed")


@contextlib.contextmanager
def _scratch() -> Iterator[tuple[Path, Callable[[str], None]]]:
    """A folder for the state of a farm, and whom to tell what is said to the user.

    It is kept when that names a file in it.
    """
    folder = Path(tempfile.mkdtemp(prefix="envfarm-test-"))
    said: list[str] = []
    try:
        yield folder, said.append
    except FarmError as error:
        said.append(str(error))
        raise
    finally:
        if not any(str(folder) in text for text in said):
            shutil.rmtree(folder, ignore_errors=True)


async def _bounded(name: str, state: Path, seconds: float) -> list[Check]:
    try:
        async with asyncio.timeout(seconds):
            return await check_environment(name, state)
    except TimeoutError:
        raise FarmError(f"{name} was not through its checks after {seconds:.0f} s; see --seconds") from None


def located(name: str) -> str:
    """The environment's name with its file made absolute, since the host may run elsewhere.

    Raises :class:`ConfigError` for what is wrong at first sight, before anything is started.
    """
    source, colon, attribute = name.rpartition(":")
    if not colon:
        _require_registered(name)
        return name
    if not source.endswith(".py"):
        return name
    file = Path(source).resolve()
    if not file.is_file():
        raise ConfigError(f"no file {file}; an environment in a file is named FILE.py:CLASS")
    return f"{file}:{attribute}"


def _require_registered(name: str) -> None:
    if name.endswith(".py"):
        raise ConfigError(f"{name!r} names a file and no class in it; write {name}:CLASS")
    registered, there = name.partition("/")[0], plugins.names("envfarm.environments")
    if registered not in there:
        hint = did_you_mean(registered, there)
        raise ConfigError(
            f"no environment named {name!r}{hint} "
            f"(registered: {', '.join(there)}; others as FILE.py:CLASS or MODULE:CLASS)"
        )


def _print_checks(console: Console, checks: list[Check]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for check in checks:
        table.add_row("[green]✓[/]" if check.ok else "[red]✗[/]", check.name, check.detail)
    console.print(table)


_TEMPLATE = '''"""What your policy should learn here, in one sentence."""

import random
from collections.abc import Iterator

from envfarm import Environment, Limits, RewardSettings, Task, tool


class {class_name}(Environment):
    """Find the number that was thought of, using its tools."""

    limits = Limits(steps=8)
    reward = RewardSettings(weights={{"completion": 1.0, "progress": 0.5, "format": 0.1}})

    def tasks(self, split: str) -> Iterator[Task]:
        """Endless; every split has seeds of its own."""
        rng = random.Random(split)
        for number in range(1_000_000):
            yield Task(id=f"{{split}}-{{number}}", seed=number, data={{"secret": rng.randint(1, 100)}})

    def reset(self, task: Task) -> str:
        """Returns the first user message."""
        self.secret = task.data["secret"]
        self.low, self.high = 1, 100
        self.said: int | None = None
        return "I think of a whole number from 1 to 100. Which one is it?"

    @tool
    def compare(self, guess: int) -> str:
        """Say whether the number is smaller than, equal to or larger than `guess`."""
        if self.secret < guess:
            self.high = min(self.high, guess - 1)
            return "smaller"
        if self.secret > guess:
            self.low = max(self.low, guess + 1)
            return "larger"
        self.low = self.high = guess
        return "equal"

    @tool(ends=True)
    def answer(self, value: int) -> None:
        """Give the final answer."""
        self.said = value

    def progress(self) -> float:
        """Potential: how much of the range is ruled out."""
        return 1.0 - (self.high - self.low) / 99

    def verify(self) -> float:
        """1.0 when the answer is right."""
        return 1.0 if self.said == self.secret else 0.0
'''
