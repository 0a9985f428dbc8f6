"""A real gateway process over real local hosts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from envfarm.core.messages import AssistantMessage, ToolCall
from envfarm.core.task import Task
from envfarm.wire.channel import connect
from envfarm.wire.episode_client import EpisodeClient

SHOP = f"{Path(__file__).parent / 'shop.py'}:Shop"
SECONDS = 60.0


class Gateway:
    """The process, where it serves, and what it needs to be started again."""

    def __init__(self, state: Path, *flags: str, listen: str = "127.0.0.1:0") -> None:
        self.state = state
        self.flags = flags
        self.listen = listen
        self.process: subprocess.Popen | None = None

    def spawn(self) -> subprocess.Popen:
        (self.state / "address").unlink(missing_ok=True)
        argv = [
            sys.executable,
            "-m",
            "envfarm.cli.main",
            "gateway",
            "--state",
            str(self.state),
            "--listen",
            self.listen,
        ]
        argv += ["--address-file", str(self.state / "address"), *self.flags]
        with (self.state / "log").open("ab") as sink:
            self.process = subprocess.Popen(argv, stderr=sink, stdout=sink, start_new_session=True)
        return self.process

    def start(self) -> Gateway:
        self.spawn()
        end = time.monotonic() + SECONDS
        while not (self.state / "address").exists():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < end, self.log
            time.sleep(0.02)
        self.listen = self.address  # a later start takes the same port
        return self

    @property
    def address(self) -> str:
        return (self.state / "address").read_text().strip()

    @property
    def token(self) -> str:
        return (self.state / "token").read_text().strip()

    @property
    def log(self) -> str:
        return (self.state / "log").read_text()

    @property
    def hosts(self) -> list[psutil.Process]:
        """Host processes that serve this gateway's state folder."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if "sandboxes.host" in line and any(str(self.state) in part for part in line):
                found.append(process)
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SECONDS)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        for host in self.hosts:
            os.killpg(host.pid, signal.SIGKILL)

    @asynccontextmanager
    async def client(self):
        async with connect(self.listen, token=self.token) as channel, EpisodeClient(channel) as client:
            yield client


@pytest.fixture(scope="module")
def gateway():
    """One gateway for the tests of a module, with four slots."""
    with tempfile.TemporaryDirectory(prefix="eg-") as folder:
        gateway = Gateway(Path(folder), "--environment", SHOP, "--slots", "4")
        try:
            yield gateway.start()
        finally:
            gateway.end()


@pytest.fixture
def make_gateway():
    """Makes gateways in state folders of their own; all ends with the test."""
    with tempfile.TemporaryDirectory(prefix="eg-") as folder:
        made = []

        def make(*flags: str, name: str = "state", listen: str = "127.0.0.1:0") -> Gateway:
            state = Path(folder) / name
            state.mkdir(exist_ok=True)
            made.append(Gateway(state, "--environment", SHOP, *flags, listen=listen))
            return made[-1]

        try:
            yield make
        finally:
            for gateway in made:
                gateway.end()


@pytest.fixture
async def client(gateway):
    async with gateway.client() as client:
        yield client


class Shopkeeper:
    """Opens episodes of the shop and speaks its tools."""

    def __init__(self, environment: str) -> None:
        self.environment = environment
        self.number = 0

    async def open(self, client, *, request_id=None, timeout=20.0, reward=None, **data):
        self.number += 1
        task = Task(id="train-0", prompt="go", data=data)
        return await client.open(
            environment=self.environment,
            task=task,
            seed=7,
            reward=reward,
            request_id=request_id or f"request-{time.time_ns()}-{self.number}",
            timeout=timeout,
        )

    def says(self, *calls, content=""):
        """An assistant message; ``calls`` are pairs of tool name and arguments."""
        made = tuple(
            ToolCall(
                f"c{i}", name, arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
            )
            for i, (name, arguments) in enumerate(calls)
        )
        return AssistantMessage(content=content, tool_calls=made)

    async def until(self, condition, seconds=20.0):
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - of another process or of gRPC: there is no event
                await asyncio.sleep(0.01)


@pytest.fixture
def shop():
    return Shopkeeper(SHOP)
