"""Commands, file calls, restoring and cancelling at once in one slot: clean errors, and nothing left."""

import asyncio
import random
import threading
from pathlib import Path

import psutil
import pytest

from envfarm.core.errors import IsolationError, SandboxError, ToolError
from envfarm.core.sandbox import SandboxProfile
from sandboxes.isolation.bwrap import require_bwrap
from sandboxes.isolation.sandbox import slot_sandbox
from sandboxes.isolation.turns import Turns

MIB = 1 << 20
PROFILE = SandboxProfile(memory_bytes=128 * MIB, disk_bytes=8 * MIB, pids=32, exec_seconds=5.0)


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
async def box(ground):
    try:
        require_bwrap()
    except IsolationError as error:
        pytest.skip(f"needs bubblewrap: {error}")
    made = slot_sandbox(ground, 7, PROFILE)
    await asyncio.to_thread(made.prepare)
    await made.exec(["/bin/true"])  # what the event loop opens for its first child stays open
    before = open_files()
    yield made
    await asyncio.to_thread(made.end_sessions)
    assert psutil.Process().children(recursive=True) == []
    assert open_files() <= before
    await asyncio.to_thread(made.close)


async def one(box, kind, kept):
    if kind == "exec":
        await box.exec(["/bin/sh", "-c", "cat; sleep 0.02"], stdin=b"in")
    elif kind == "start":
        process = await box.start(["/bin/sh", "-c", "echo up; sleep 30"])
        await process.read()
        await process.close()
    elif kind == "restore":
        await box.restore(kept)
    else:
        await box.write("a/b/c", b"x" * 10_000)
        await box.read("a/b/c")
        await box.list(depth=3)


async def test_what_starts_while_files_are_restored_runs_or_fails_cleanly(box):
    await box.write("kept", b"kept")
    kept = await box.snapshot()
    kinds = ["exec", "start", "file", "restore"] * 25
    random.Random(1).shuffle(kinds)
    slots = asyncio.Semaphore(6)

    async def attempt(kind):
        async with slots, asyncio.timeout(20):
            try:
                await one(box, kind, kept)
            except (SandboxError, ToolError) as error:
                return error
            return None

    async with asyncio.timeout(50):
        ends = await asyncio.gather(*(attempt(kind) for kind in kinds))
    for kind, error in zip(kinds, ends, strict=True):
        if kind in ("exec", "start"):
            assert error is None or "ended before it ran" in str(error)
        elif kind == "restore":
            assert error is None
    await box.restore(kept)
    assert [entry.path for entry in await box.list()] == ["kept"]


async def test_a_call_that_is_cancelled_at_any_moment_leaves_nothing(box):
    kept = await box.snapshot()
    chance = random.Random(2)
    for turn in range(60):
        kind = ("exec", "start", "file", "restore")[turn % 4]
        task = asyncio.create_task(one(box, kind, kept))
        for _ in range(chance.randrange(1, 3)):  # once, or again while it clears up
            await asyncio.wait([task], timeout=0.05 * chance.random() ** 2)
            task.cancel()
        async with asyncio.timeout(10):
            await asyncio.wait([task])
        assert task.cancelled() or task.exception() is None
        if turn % 10 == 9:
            await asyncio.to_thread(box.end_sessions)
            assert psutil.Process().children(recursive=True) == []
    assert (await box.exec(["/bin/echo", "on"])).stdout == b"on\n"


@pytest.mark.parametrize("argv", [[], ["a\0b"], ["\ud800"], ["x" * 200_000], ["x" * 100_000] * 12])
async def test_words_that_are_no_command_are_told_to_the_model(box, argv):
    with pytest.raises(ToolError):
        await box.exec(argv)
    with pytest.raises(ToolError):
        await box.start(argv)
    with pytest.raises(ToolError):
        await box.exec(["/bin/true"], env={"WORD": "a\0b"})


async def test_a_path_that_is_no_text_is_told_to_the_model(box):
    for call in (box.read, box.list, box.remove):
        with pytest.raises(ToolError, match="not a path"):
            await call("\ud800")
    with pytest.raises(ToolError, match="not a path"):
        await box.write("\ud800", b"")


async def test_who_replaces_the_files_waits_for_those_at_them_and_can_be_stopped():
    turns, stop = Turns(), threading.Event()
    order = []

    def replace():
        with turns.alone(stop):
            order.append("replaced")

    async with turns.entered():
        replacing = asyncio.create_task(asyncio.to_thread(replace))
        while turns._enter():  # until the other one is in line
            turns._leave()
            await asyncio.sleep(0)
        later = asyncio.create_task(_enter(turns, order))
        order.append("used")
    await asyncio.gather(replacing, later)
    assert order == ["used", "replaced", "used later"]


async def _enter(turns, order):
    async with turns.entered():
        order.append("used later")


async def test_a_replacement_that_nobody_waits_for_gives_way():
    turns, stop = Turns(), threading.Event()

    def replace():
        with turns.alone(stop):
            pytest.fail("was stopped before")

    async with turns.entered():
        replacing = asyncio.create_task(asyncio.to_thread(replace))
        stop.set()
        await asyncio.wait([replacing])
        assert type(replacing.exception()).__name__ == "Interrupted"
    async with turns.entered():
        pass
