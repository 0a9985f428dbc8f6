"""Latency of the kept shell and the kept Python, beside the same programs on bare pipes, in one process and run."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

from envfarm.core.environment import Environment
from envfarm.core.sandbox import SandboxProfile
from sandboxes.isolation import mounts
from sandboxes.isolation.sandbox import SlotSandbox, slot_sandbox
from sandboxes.tools.python import Python
from sandboxes.tools.shell import Shell

FIRST = 20
LATER = 500
_LOOP = (
    "import sys\nscope = {}\nfor line in sys.stdin:\n    exec(line, scope)\n    sys.stdout.write('end\\n')\n"
    "    sys.stdout.flush()"
)


class Bench(Environment):
    """Has both."""

    profile = SandboxProfile()
    toolsets = (Shell, Python)


def measure() -> dict[str, float | str]:
    """Milliseconds of a first call, which starts the session, and of later ones: p50 and p99."""
    ground = mounts.own_ground()
    try:
        return asyncio.run(_measure(slot_sandbox(ground, 0, Bench.profile)))
    finally:
        mounts.leave_ground(ground)


async def _measure(sandbox: SlotSandbox) -> dict[str, float | str]:
    environment = Bench()
    environment.equip(sandbox)
    shell, python = environment.toolset(Shell), environment.toolset(Python)
    figures: dict[str, float | str] = {}
    await shell.bash("true")  # what is found out once per host
    tools = {"shell": (shell, lambda: shell.bash("echo 1")), "python": (python, lambda: python.python("print(1)"))}
    bare = {
        "bare_bash": (["bash", "--norc", "--noprofile"], b"echo 1; echo end\n"),
        "bare_python": ([sys.executable, "-I", "-c", _LOOP], b"print(1)\n"),
    }
    try:
        for name, (toolset, call) in tools.items():
            first = []
            for _ in range(FIRST):
                await asyncio.to_thread(sandbox.end_sessions)
                toolset.reset()
                first.append(await _timed(call))
            _note(figures, f"{name}_first", first)
            _note(figures, f"{name}_later", [await _timed(call) for _ in range(LATER)])
        for name, (argv, request) in bare.items():
            first, later = await _bare(argv, request)
            _note(figures, f"{name}_first", first)
            _note(figures, f"{name}_later", later)
    finally:
        await asyncio.to_thread(sandbox.close)
    return figures


async def _bare(argv: list[str], request: bytes) -> tuple[list[float], list[float]]:
    first: list[float] = []
    later: list[float] = []
    for round_ in range(FIRST):
        started = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        source, sink = process.stdin, process.stdout
        if source is None or sink is None:
            raise RuntimeError("no pipes")

        async def call(source: asyncio.StreamWriter = source, sink: asyncio.StreamReader = sink) -> None:
            source.write(request)
            await source.drain()
            await sink.readuntil(b"end\n")

        await call()
        first.append(time.perf_counter() - started)
        if round_ == 0:
            later = [await _timed(call) for _ in range(LATER)]
        source.close()
        await process.wait()
    return first, later


async def _timed(call: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    await call()
    return time.perf_counter() - started


def _note(figures: dict[str, float | str], name: str, seconds: list[float]) -> None:
    figures[f"{name}_p50_ms"] = statistics.median(seconds) * 1000
    figures[f"{name}_p99_ms"] = statistics.quantiles(seconds, n=100, method="inclusive")[98] * 1000
