"""Environments that behave as badly as their tasks say; hosts under test load them by path."""

import asyncio
import itertools
import os
import time
from pathlib import Path
from typing import ClassVar

from envfarm.core.environment import Environment, Toolset, tool
from envfarm.core.errors import ToolError
from envfarm.core.messages import Message
from envfarm.core.rewards import RewardSettings
from envfarm.core.sandbox import Isolation, SandboxProfile
from envfarm.core.task import Limits, Task


class Counter(Environment):
    """Counts how often its tool really ran."""

    limits = Limits(steps=5, tool_seconds=0.4, reset_seconds=0.5, verify_seconds=0.5, result_bytes=1000, seconds=30.0)
    system_prompt = "Count."
    rewards: ClassVar = {"evenness": lambda environment: float(environment.count % 2 == 0)}
    reward = RewardSettings(weights={"completion": 1.0})

    def tasks(self, split):
        return (Task(id=f"{split}-{i}", prompt="go", seed=i) for i in itertools.count())

    def reset(self, task):
        self.count = 0
        self.task = task
        how = task.data.get("reset")
        self.mark = task.data.get("mark")
        if how == "raises":
            raise ValueError("no such shelf")
        if how == "hangs":
            time.sleep(30)
        if how == "loops":
            while True:
                pass
        if how == "wrong":
            return 7
        if how == "messages":
            return [Message(role="user", content="one"), Message(role="user", content="two")]
        return f"seed {self.seed}"

    @tool
    def add(self, amount: int = 1) -> int:
        """Add to the count."""
        self.count += amount
        return self.count

    @tool
    async def add_slowly(self, seconds: float = 0.05) -> int:
        """Add one after a while."""
        await asyncio.sleep(seconds)
        self.count += 1
        return self.count

    @tool
    def misbehave(self, how: str) -> object:
        """Do what no tool should do."""
        self.count += 1
        return MISBEHAVIOUR[how]()

    @tool
    def wait(self, seconds: float) -> str:
        """Block without a look at the clock."""
        time.sleep(seconds)
        return "waited"

    @tool(ends=True)
    def finish(self, value: int) -> None:
        """End."""
        self.value = value
        if value < 0:
            raise ToolError("give a positive number")

    def close(self):
        if self.mark:
            with Path(self.mark).open("a") as file:
                file.write("closed\n")

    def reply(self, message):
        return "go on" if "more" in message else None

    def progress(self):
        how = self.task.data.get("progress")
        if how == "raises" and self.count:
            raise KeyError("gone")
        if how == "beyond" and self.count:
            return 1.5
        return min(1.0, self.count / 4)

    def verify(self):
        how = self.task.data.get("verify")
        if how == "raises":
            raise RuntimeError("no judge")
        if how == "hangs":
            time.sleep(30)
        if how == "unknown":
            return None
        return 1.0 if self.count == getattr(self, "value", None) else 0.0


def _spin():
    while True:
        pass


def _swallow():
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            return "swallowed"


class Odd:
    pass


def _raise(error):
    raise error


MISBEHAVIOUR = {
    "raises": lambda: _raise(ValueError("bad\nsecond line")),
    "says no": lambda: _raise(ToolError("sold out")),
    "exits": lambda: os.sys.exit(3),
    "stops": lambda: _raise(StopIteration()),
    "spins": _spin,
    "swallows": _swallow,
    "sleeps": lambda: time.sleep(30),
    "object": Odd,
    "huge": lambda: "x" * 10_000_000,
    "nested": lambda: {"a": [1, 2.5, None, True]},
    "surrogate": lambda: "broken \ud800 text",
    "none": lambda: None,
}


class Plain(Environment):
    """Everything left at its default."""

    def tasks(self, split):
        return [Task(id="only", prompt="hello", data={"x": 1})]

    @tool
    def echo(self, text: str) -> str:
        """Say it again."""
        return text


class BrokenTasks(Environment):
    """Its tasks cannot be made."""

    def tasks(self, split):
        raise RuntimeError("no data")


class Shell(Toolset):
    """Runs what it is told, isolated."""

    executes = True

    @tool
    async def run(self, command: str) -> str:
        """Run a command."""
        result = await self.sandbox.exec(["/bin/sh", "-c", command])
        return (result.stdout + result.stderr).decode(errors="replace")

    @tool
    async def read(self, path: str) -> str:
        """Read a file."""
        return (await self.sandbox.read(path)).decode(errors="replace")

    @tool
    async def write(self, path: str, text: str) -> str:
        """Write a file."""
        await self.sandbox.write(path, text.encode())
        return "written"


class Workshop(Environment):
    """Runs commands in a sandbox."""

    toolsets = (Shell,)
    limits = Limits(steps=20, tool_seconds=10.0)

    def tasks(self, split):
        return [Task(id="only", prompt="work", files={"notes/a.txt": b"alpha"})]


class Impossible(Workshop):
    """Asks for an isolation that a local host does not have."""

    profile = SandboxProfile(isolation=Isolation.GVISOR)


class Trusting(Workshop):
    """Says in as many words that nothing is isolated."""

    profile = SandboxProfile(isolation=Isolation.NONE)


class Brief(Counter):
    """Its episodes may idle for half a second."""

    limits = Limits(seconds=0.5)
