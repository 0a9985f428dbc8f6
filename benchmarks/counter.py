"""The environment that the step benchmark drives: one cheap tool, so that what is measured is the farm."""

from __future__ import annotations

from collections.abc import Iterator

from envfarm import Environment, Limits, RewardSettings, Task, tool


class Counter(Environment):
    """Count up, one call at a time."""

    limits = Limits(steps=4_000_000_000, seconds=3600.0)
    reward = RewardSettings(weights={"completion": 1.0, "format": 0.1, "tool": 0.1, "progress": 0.5})

    def tasks(self, split: str) -> Iterator[Task]:
        """One task is enough."""
        yield Task(id=f"{split}-0", prompt="Count.")

    def reset(self, task: Task) -> str:
        """Starts from zero."""
        self.count = 0
        return "Count."

    @tool
    def add(self, amount: int) -> int:
        """Add `amount`; returns the sum."""
        self.count += amount
        return self.count

    def progress(self) -> float:
        """Approaches 1."""
        return self.count / (self.count + 100)


class Runner(Counter):
    """Counts by commands in the sandbox."""

    executes = True

    @tool
    async def run(self, amount: int) -> str:
        """Run a command that says `amount`."""
        result = await self.sandbox.exec(["sh", "-c", f"echo {amount} | tee sum"])
        return result.stdout.decode()
