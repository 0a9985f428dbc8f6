"""An environment for gateway tests: counts what it runs, waits when told to, breaks when told to."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar

from envfarm.core.environment import Environment, tool
from envfarm.core.errors import ToolError
from envfarm.core.rewards import RewardSettings
from envfarm.core.task import Limits, Task


class Shop(Environment):
    """Counts."""

    limits = Limits(steps=1000, seconds=60, tool_seconds=20, result_bytes=1000, calls_per_step=3, message_bytes=5000)
    reward = RewardSettings(
        weights={"completion": 1.0, "progress": 0.5, "format": 0.1, "sold": 2.0}, caps={"sold": 1.0}
    )
    system_prompt = "You keep a shop."
    rewards: ClassVar = {"sold": lambda self: float(self.count) if self.count else None}

    def tasks(self, split):
        return (Task(id=f"{split}-{i}", prompt=f"task {i}") for i in range(5))

    def reset(self, task):
        if task.data.get("break"):
            raise RuntimeError("the shelf fell over")
        self.count = 0
        self.answer = None
        return task.prompt

    @tool
    def sell(self, pieces: int) -> str:
        """Sell pieces."""
        self.count += 1
        return f"sold {pieces}, call {self.count}"

    @tool
    def wait_for(self, path: str) -> str:
        """Waits until a file is there; says so in another."""
        Path(path + ".started").touch()
        while not Path(path).exists():
            time.sleep(0.01)
        self.count += 1
        return f"waited, call {self.count}"

    @tool
    def refuse(self) -> None:
        """Says no."""
        raise ToolError("error: no")

    @tool(ends=True)
    def finish(self, right: bool) -> None:
        """Ends."""
        self.answer = right

    def reply(self, message):
        return "use a tool" if message else None

    def progress(self):
        return min(1.0, self.count / 10)

    def verify(self):
        return float(self.answer) if self.answer is not None else None
