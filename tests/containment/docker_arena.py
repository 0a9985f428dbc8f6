"""The arena as an environment: hostile programs in a slot of whatever host serves it, such as one in a container."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path

from envfarm.core.environment import Environment, tool
from envfarm.core.sandbox import Isolation, SandboxProfile
from envfarm.core.task import Limits, Task
from sandboxes.isolation.bwrap import python

_spec = importlib.util.spec_from_file_location("hostile", Path(__file__).with_name("hostile.py"))
hostile = importlib.util.module_from_spec(_spec)
sys.modules["hostile"] = hostile
_spec.loader.exec_module(hostile)

ATTACKS = {attack.name: attack for attack in hostile.ATTACKS}
_bait = hostile.bait()
BAIT = _bait.__enter__()  # stands about until the host ends


class Arena(Environment):
    """Runs one attack after the other."""

    executes = True
    limits = Limits(steps=1000, seconds=600, tool_seconds=30, result_bytes=65_536)
    profile = SandboxProfile(
        isolation=Isolation.CONTAINER,
        memory_bytes=hostile.MEMORY,
        disk_bytes=hostile.DISK,
        pids=hostile.PIDS,
        exec_seconds=hostile.SECONDS,
        output_bytes=hostile.OUTPUT,
    )

    def tasks(self, split):
        yield Task(id="t", prompt="fight")

    @tool
    async def fight(self, attack: str) -> str:
        """Runs an attack; answers with JSON."""
        tried = ATTACKS[attack]
        began = time.perf_counter()
        argv = [python(), "-I", "-c", hostile.program(tried, BAIT)]
        result = await self.sandbox.exec(argv, seconds=tried.seconds)
        seconds = time.perf_counter() - began
        said = (result.stdout + b"\n" + result.stderr).decode(errors="replace")
        breach = hostile.verdict(tried, output=said, exit_code=result.exit_code, timed_out=result.timed_out)
        kept = len(result.stdout) + len(result.stderr)
        return json.dumps({"breach": breach, "seconds": seconds, "kept": kept})

    @tool
    async def small(self) -> str:
        """Runs a small command; answers with how long it took."""
        began = time.perf_counter()
        result = await self.sandbox.exec(["/bin/true"])
        if result.exit_code != 0:
            raise RuntimeError(f"true ended with {result.exit_code}: {result.stderr!r}")
        return str(time.perf_counter() - began)
