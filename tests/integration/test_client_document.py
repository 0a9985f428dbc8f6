"""What docs/client.md tells to type works as it stands there, against a real gateway."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envfarm.core import errors
from envfarm.core.log import LogRecord
from envfarm.core.messages import Message
from envfarm.core.outcome import Outcome
from envfarm.core.run import Run, RunSettings
from envfarm.core.sandbox import Isolation
from envfarm.core.trajectory import Trajectory, TrajectoryHeader
from envfarm.trajectories.codec import encode
from envfarm.wire.auth import read_token
from envfarm.wire.channel import connect
from envfarm.wire.episode_client import EpisodeClient
from envfarm.wire.log_client import LogClient
from envfarm.wire.run_client import RunClient

DOCUMENT = (Path(__file__).parents[2] / "docs/client.md").read_text()
SECONDS = 60.0


def blocks(language: str) -> list[str]:
    """Contents of the page's fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)


GATEWAY, *SCRIPTS = [shlex.split(block) for block in blocks("sh")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the page's gateway serves and its scripts lie, under the names that they have there."""
    folder = tmp_path_factory.mktemp("client")
    for code in blocks("python"):
        (folder / re.match(r"# (\w+\.py)\n", code)[1]).write_text(code)
    assert GATEWAY[0] == "envfarm"
    argv = [sys.executable, "-m", "envfarm.cli.main", *GATEWAY[1:]]
    with (folder / "log").open("wb") as log:
        gateway = subprocess.Popen(argv, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        end = time.monotonic() + SECONDS
        while not (folder / "farm/address").exists():
            assert gateway.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < end, (folder / "log").read_text()
            time.sleep(0.02)
        yield folder
    finally:
        gateway.send_signal(signal.SIGTERM)  # its host ends with it
        gateway.wait(SECONDS)


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A command of the page; it finds nothing of the tests."""
    assert words[0] == "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    argv = [sys.executable, *words[1:]]
    return subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )


async def stored_run(folder: Path) -> Run:
    """A run in the gateway's log, with two groups of one episode each."""
    address = (folder / "farm/address").read_text()
    async with connect(address, token=read_token(folder / "farm/token")) as channel, LogClient(channel) as log:
        settings = RunSettings(environment="stockroom", group_size=1, purpose="collect")
        made = await RunClient(channel).create("rollout", settings)
        await log.append([record(made.id, number) for number in range(2)])
        return made


def record(run_id: str, number: int) -> LogRecord:
    t = Trajectory(
        id=f"{run_id}-{number}",
        run_id=run_id,
        group_id=f"{run_id}/{number}",
        group_size=1,
        member=0,
        attempt=0,
        final=True,
        purpose="collect",
        environment="stockroom@1",
        split="train",
        task_id=f"train-{number}",
        seed=1,
        policy="p",
        outcome=Outcome.completed(),
        prompt=(Message(role="user", content="hi"),),
        segments=(),
        steps=(),
        reward=1.0,
        catalogue="",
        isolation=Isolation.NONE,
        started_at=0.0,
        ended_at=1.0,
    )
    return LogRecord(header=TrajectoryHeader.of(t), payload=encode(t))


def test_the_episodes_end_as_they_are_shown(folder):
    done = run(SCRIPTS[0], folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == blocks("text")[0]


def test_the_trajectories_of_a_run_are_read_as_they_are_shown(folder):
    asyncio.run(stored_run(folder))
    done = run(SCRIPTS[1], folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == blocks("text")[1]


def test_a_mistake_is_told_in_one_line(folder):
    script = (folder / "drive.py").read_text()
    (folder / "mistaken.py").write_text(script.replace('describe("stockroom")', 'describe("stokroom")'))
    done = run(["python", "mistaken.py"], folder)
    assert done.returncode == 1
    assert (
        done.stderr == "ConfigError: no environment 'stokroom' here; did you mean 'stockroom'? (there is: stockroom)\n"
    )


def test_clients_load_nothing_beyond_the_base_install():
    heavy = ("torch", "transformers", "aiohttp", "renderers", "httpx", "jinja2", "re2")
    imports = "\n".join(re.findall(r"^(?:import|from) .*$", "\n".join(blocks("python")), re.MULTILINE))
    program = f"{imports}\nimport sys\nprint([m for m in {heavy} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert loaded.stdout.strip() == "[]"


@pytest.mark.parametrize("client", [EpisodeClient, RunClient, LogClient])
def test_every_method_of_a_client_is_named(client):
    episodes, _, others = DOCUMENT.partition("## Reading trajectories")
    section = episodes if client is EpisodeClient else others
    names = {name for name, _ in inspect.getmembers(client, inspect.isfunction) if not name.startswith("_")}
    if client is LogClient:
        names.remove("close")  # leaving the context does that
    assert {name for name in names if not re.search(rf"`{name}[(`]", section)} == set()


@pytest.mark.parametrize("signature", re.findall(r"^\| `(\w+\(.*?\))` \|", DOCUMENT, re.MULTILINE))
def test_a_method_takes_the_arguments_that_are_shown(signature):
    name, arguments = re.fullmatch(r"(\w+)\((.*)\)", signature).groups()
    parameters = inspect.signature(getattr(EpisodeClient, name)).parameters
    told = [argument.partition("=")[0] for argument in arguments.split(", ")]
    assert told
    assert [argument for argument in told if argument not in parameters] == []


def test_every_error_in_the_table_is_one_of_the_farm():
    named = re.findall(r"^\| `(\w+)` \| ", DOCUMENT.partition("## Errors")[2], re.MULTILINE)
    assert len(named) > 5
    assert all(issubclass(getattr(errors, name), errors.FarmError) for name in named)
