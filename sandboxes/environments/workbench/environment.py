"""The workbench as an environment: a project with a fault, tools to find and mend it, and a judge out of reach."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

import msgspec

from envfarm.core.environment import Environment, tool
from envfarm.core.errors import ConfigError
from envfarm.core.ids import derived_seed
from envfarm.core.rewards import RewardSettings
from envfarm.core.sandbox import SandboxProfile
from envfarm.core.task import Limits, Task
from sandboxes.environments.workbench.families import FAMILIES, HELD_OUT
from sandboxes.environments.workbench.judge import share_right
from sandboxes.environments.workbench.project import Project, project
from sandboxes.tools.files import Files
from sandboxes.tools.python import Python
from sandboxes.tools.shell import Shell

_TRAINING = tuple(name for name in FAMILIES if name not in HELD_OUT)
SPLITS = {"train": _TRAINING, "validation": _TRAINING, "test": HELD_OUT}
FINITE_SIZE = 48  # tasks in ``validation`` and in ``test``
_PROMPT = """\
The program {name}.py in your working folder has a fault: test_{name}.py does not pass. Find the fault and mend it, so \
that every function does what its docstring says. Other calls than those of the test will decide. Call submit when you \
are done."""


class Bench(msgspec.Struct, frozen=True):
    """Which project a task has."""

    family: str
    fault: int
    draw: int  # seed of the cases


class Workbench(Environment):
    """Repair a small program with a shell, Python and an editor.

    A project has one fault and a test that shows it. What decides is whether the program returns the right values for
    calls that nobody saw, made when the episode is over. ``train`` never ends; ``test`` has programs that no training
    task has.
    """

    version = "1"
    system_prompt = "You are a programmer at work in a sandbox. Use the tools; keep changes small."
    limits = Limits(steps=20, seconds=600.0, tokens_per_step=768, context_tokens=16_384, tool_seconds=20.0)
    profile = SandboxProfile(memory_bytes=256 * 1024 * 1024, disk_bytes=32 * 1024 * 1024)
    reward = RewardSettings(weights={"completion": 1.0, "format": 0.1, "efficiency": 0.1})
    toolsets = (Shell(), Python(), Files(max_lines=200))
    executes = True

    def tasks(self, split: str) -> Iterable[Task]:
        """The same tasks in the same order on every machine, families in turn."""
        if split not in SPLITS:
            raise ConfigError(f"workbench has no split {split!r} (there is: {', '.join(SPLITS)})")
        indices = itertools.count() if split == "train" else range(FINITE_SIZE)
        return (_task(split, index) for index in indices)

    async def reset(self, task: Task) -> str:
        """Lay the project out."""
        bench = msgspec.convert(task.data, Bench)
        self._project: Project = await asyncio.to_thread(project, bench.family, bench.fault, bench.draw)
        for path, data in self._project.files.items():
            await self.sandbox.write(path, data)
        return _PROMPT.format(name=bench.family)

    @tool(ends=True)
    def submit(self) -> str:
        """Hand the program in as it is now. Ends the task."""
        return "handed in"

    async def verify(self) -> float:
        """1.0 when the program is right in every case that decides, else 0.0."""
        share = await share_right(self.sandbox, self._project.family, self._project.deciding)
        return 1.0 if share == 1.0 else 0.0


def _task(split: str, index: int) -> Task:
    families = SPLITS[split]
    seed = derived_seed("workbench", split, index)
    family = families[index % len(families)]
    bench = Bench(family, seed % len(FAMILIES[family].faults), seed)
    return Task(id=f"{split}-{index}", prompt=_PROMPT.format(name=family), seed=seed, data=msgspec.to_builtins(bench))
