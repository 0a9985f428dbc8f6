"""The engine's thread when a forward pass breaks: nobody who waits is forgotten."""

import asyncio
import threading

import pytest

pytest.importorskip("torch")

from envfarm.inference.embedded.thread import EngineStopped, EngineThread

SECONDS = 10


class Breaks:
    """A scheduler whose pass fails once it is let go."""

    idle = False

    def __init__(self):
        self.entered = threading.Event()
        self.go = threading.Event()

    def step(self):
        self.entered.set()
        self.go.wait(SECONDS)
        raise RuntimeError("out of memory")


async def test_a_command_that_waits_while_the_engine_fails_is_answered_and_later_ones_are_told_why():
    scheduler = Breaks()
    engine = EngineThread(scheduler, max_queued=1)
    engine.start()
    assert await asyncio.to_thread(scheduler.entered.wait, SECONDS)
    waiting = asyncio.create_task(engine.call(lambda _: "done"))
    await asyncio.sleep(0)  # it is sent
    scheduler.go.set()
    async with asyncio.timeout(SECONDS):
        assert await waiting == "done"
    assert not engine.healthy
    with pytest.raises(EngineStopped, match="out of memory"):
        await engine.call(lambda _: "done")
    await engine.stop()
