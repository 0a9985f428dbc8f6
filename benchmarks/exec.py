"""Latency of one confined command, beside the same confinement started by hand, in one run and in turn.

Each figure is of ``/bin/true``. ``hand``: the very command line that the sandbox starts, bubblewrap and the change of
user, from a plain blocking ``subprocess.run``; it lacks the gate, the control groups and the event loop. ``bare``:
bubblewrap alone with these flags, as whoever this process is. Other levels and ``docker run`` where they can be had.
Then what a neighbour's commands take alone and while hostile programs run next door.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType

import msgspec

from envfarm.core.errors import FarmError
from envfarm.core.sandbox import Isolation, SandboxProfile
from sandboxes.isolation import bwrap, mounts
from sandboxes.isolation.command_line import OUTSIDE, command_line
from sandboxes.isolation.files.workspace import Workspace
from sandboxes.isolation.sandbox import SlotSandbox, slot_sandbox
from sandboxes.isolation.user import sandbox_user

COMMANDS = 240
BLOCK = 20
SLOW_COMMANDS = 10
NEIGHBOUR_SECONDS = 1.2
TRUE = ["/bin/true"]
NEIGHBOURS = ("fork bomb", "all processors at once", "ten times the memory, by many", "a gibibyte on stdout")
PROFILE = SandboxProfile(memory_bytes=128 * 2**20, disk_bytes=8 * 2**20, pids=32)
Figures = dict[str, float | str]


def measure() -> Figures:
    """Milliseconds, p50 and p99, and ratios."""
    ground = mounts.own_ground()
    try:
        return asyncio.run(_measure(ground))
    finally:
        mounts.leave_ground(ground)


async def _measure(ground: Path) -> Figures:
    figures: Figures = {}
    async with contextlib.AsyncExitStack() as stack:
        box, neighbour = (_box(ground, slot, PROFILE, stack) for slot in (0, 1))
        await asyncio.to_thread(box.prepare)
        await asyncio.to_thread(neighbour.prepare)
        figures["exec_bounds"] = ", ".join(sorted(box.controls))
        await _beside_by_hand(figures, ground, box)
        await _other_levels(figures, ground, stack)
        await _docker(figures)
        await _neighbour(figures, box, neighbour)
    return figures


def _box(ground: Path, slot: int, profile: SandboxProfile, stack: contextlib.AsyncExitStack) -> SlotSandbox:
    box = slot_sandbox(ground, slot, profile)
    stack.push_async_callback(asyncio.to_thread, box.close)
    return box


async def _beside_by_hand(figures: Figures, ground: Path, box: SlotSandbox) -> None:
    workspace = Workspace(ground / "slot-9", sandbox_user(9))
    workspace.prepare(PROFILE.disk_bytes)
    controls = frozenset({"memory", "pids", "cpu", "disk"})
    hand = command_line(TRUE, workspace=workspace, profile=PROFILE, controls=controls, user=sandbox_user(9))
    bare = bwrap.command(TRUE, workspace=workspace, profile=PROFILE, env=None)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "exec": lambda: box.exec(TRUE),
        "hand": lambda: _by_hand(hand),
        "bare": lambda: _by_hand(bare),
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    try:
        for _ in range(COMMANDS // BLOCK):
            for name, call in calls.items():
                await call()  # the kernel still clears away what came before
                taken[name] += [await _timed(call) for _ in range(BLOCK)]
    finally:
        workspace.empty()
    for name, values in taken.items():
        _note(figures, name, values)
    for name in ("hand", "bare"):
        figures[f"exec_ratio_to_{name}"] = statistics.median(taken["exec"]) / statistics.median(taken[name])


async def _by_hand(argv: list[str]) -> None:
    """Blocks, as by hand; nothing else runs meanwhile."""
    subprocess.run(argv, check=True, capture_output=True, stdin=subprocess.DEVNULL, env=OUTSIDE)  # noqa: ASYNC221 - as by hand


async def _other_levels(figures: Figures, ground: Path, stack: contextlib.AsyncExitStack) -> None:
    profile = msgspec.structs.replace(PROFILE, isolation=Isolation.GVISOR)
    box = _box(ground, 2, profile, stack)
    try:
        await asyncio.to_thread(box.prepare)
    except FarmError as error:
        figures["gvisor"] = str(error)
        return
    _note(figures, "gvisor", [await _timed(lambda: box.exec(TRUE)) for _ in range(SLOW_COMMANDS)])


async def _docker(figures: Figures) -> None:
    """``docker run`` of any image that is there."""
    docker = shutil.which("docker")
    image = await asyncio.to_thread(_any_image, docker) if docker is not None else ""
    if docker is None or not image:
        figures["docker_run"] = "no Docker, or no image"
        return
    argv = [docker, "run", "--rm", "--network", "none", "--entrypoint", "/bin/true", image]
    try:
        _note(figures, "docker_run", [await _timed(lambda: _by_hand(argv)) for _ in range(SLOW_COMMANDS)])
    except subprocess.CalledProcessError as error:
        figures["docker_run"] = error.stderr.decode(errors="replace").strip()


def _any_image(docker: str) -> str:
    listed = subprocess.run([docker, "images", "-q"], capture_output=True, text=True, check=False)
    return next(iter(listed.stdout.split()), "")


async def _neighbour(figures: Figures, box: SlotSandbox, neighbour: SlotSandbox) -> None:
    """What a neighbour feels: p50 and p99 of its commands, alone and beside an attack."""
    hostile = _hostile()
    attacks = {attack.name: attack for attack in hostile.ATTACKS}
    alone = await _commands(neighbour, asyncio.create_task(asyncio.sleep(NEIGHBOUR_SECONDS)))
    _note(figures, "neighbour_alone", alone)
    with hostile.bait() as bait:
        for name in NEIGHBOURS:
            attack = attacks[name]
            argv = [bwrap.python(), "-I", "-c", hostile.program(attack, bait)]
            taken: list[float] = []
            until = time.monotonic() + NEIGHBOUR_SECONDS
            while time.monotonic() < until:
                taken += await _commands(neighbour, asyncio.create_task(box.exec(argv, seconds=attack.seconds)))
            key = "neighbour_of_" + name.replace(",", "").replace(" ", "_")
            _note(figures, key, taken)
            figures[f"{key}_p99_growth"] = _p99(taken) / _p99(alone)


async def _commands(box: SlotSandbox, until: asyncio.Task[object]) -> list[float]:
    taken: list[float] = []
    while not until.done():
        taken.append(await _timed(lambda: box.exec(TRUE)))
    await until
    return taken


def _hostile() -> ModuleType:
    path = Path(__file__).parents[1] / "tests" / "containment" / "hostile.py"
    spec = importlib.util.spec_from_file_location("hostile", path)
    if spec is None or spec.loader is None:
        raise ImportError(str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules["hostile"] = module
    spec.loader.exec_module(module)
    return module


async def _timed(call: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await call()
    return time.perf_counter() - began


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


def _note(figures: Figures, name: str, seconds: list[float]) -> None:
    figures[f"{name}_p50_ms"] = statistics.median(seconds) * 1e3
    figures[f"{name}_p99_ms"] = _p99(seconds) * 1e3
