"""Environment code off the loop: order, overlap, limits, threads."""

import asyncio
import threading
import time

import pytest

from sandboxes.host.runner import CallOverdue, CodeExited, Job, Runner

SECONDS = 10.0


@pytest.fixture
async def runner():
    made = Runner()
    yield made
    await made.close()


async def run(runner, function, seconds=5.0, *args, abandoned=None):
    """Result of one call on the runner."""
    future = asyncio.get_running_loop().create_future()
    again = []

    def steps(job):
        if again:
            return "went on elsewhere"
        return (yield from job.invoke(function, seconds, *args))

    def done(value, error):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def given_up(thread):
        again.append(thread)
        if abandoned is not None:
            abandoned(thread)

    runner.submit(Job(steps, done, given_up))
    async with asyncio.timeout(SECONDS):
        return await future


async def test_plain_and_async_functions_give_their_results(runner):
    async def slow(a, b):
        await asyncio.sleep(0)
        return a + b

    assert await run(runner, lambda a, b: a * b, 5.0, 6, 7) == 42
    assert await run(runner, slow, 5.0, 6, 7) == 13


async def test_neither_plain_nor_async_code_runs_on_the_loop_of_the_host(runner):
    async def where():
        return threading.current_thread()

    assert await run(runner, threading.current_thread) is not threading.main_thread()
    assert await run(runner, where) is not threading.main_thread()


async def test_async_code_that_blocks_does_not_hold_the_host_and_is_interrupted(runner):
    def spin():
        while True:
            pass

    async def blocks():
        spin()

    async def fine():
        return "fine"

    turns = 0

    async def turn():
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    turning = asyncio.create_task(turn())
    with pytest.raises(CallOverdue):
        await run(runner, blocks, 0.2)
    assert turns > 5
    turning.cancel()
    assert await run(runner, fine) == "fine"


async def test_async_code_that_blocks_in_c_is_left_behind(runner):
    release = threading.Event()

    async def blocks():
        release.wait(30)

    async def fine():
        return "fine"

    with pytest.raises(CallOverdue):
        await run(runner, blocks, 0.1)
    assert await run(runner, fine) == "fine"
    release.set()


async def test_async_code_that_ignores_its_cancellation_is_left_alone(runner):
    async def stubborn():
        for _ in range(20):
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                continue

    with pytest.raises(CallOverdue):
        await run(runner, stubborn, 0.05)
    assert await run(runner, lambda: "alive") == "alive"


async def test_jobs_of_one_turn_run_in_order_on_one_thread(runner):
    seen = []
    await asyncio.gather(*(run(runner, lambda i=i: seen.append((i, threading.get_ident()))) for i in range(50)))
    assert [i for i, _ in seen] == list(range(50))
    assert len({ident for _, ident in seen}) == 1


async def test_exceptions_pass_through(runner):
    async def fails():
        raise KeyError("async")

    with pytest.raises(ZeroDivisionError):
        await run(runner, lambda: 1 / 0)
    with pytest.raises(KeyError, match="async"):
        await run(runner, fails)


async def test_code_that_tries_to_end_the_process_only_fails(runner):
    with pytest.raises(CodeExited, match="SystemExit: 3"):
        await run(runner, lambda: exec("raise SystemExit(3)"))
    assert await run(runner, lambda: "alive") == "alive"


async def test_a_python_loop_is_interrupted_at_its_limit_and_its_thread_serves_on(runner):
    def spin():
        while True:
            pass

    start = time.monotonic()
    with pytest.raises(CallOverdue):
        await run(runner, spin, 0.1)
    assert time.monotonic() - start < 2
    assert await run(runner, lambda: "alive") == "alive"


async def test_a_thread_stuck_in_c_is_given_up_and_the_job_goes_on_elsewhere(runner):
    release = threading.Event()
    stuck = []

    def block():
        release.wait(30)
        return "too late"

    assert await run(runner, block, 0.1, abandoned=stuck.append) == "went on elsewhere"
    assert stuck[0].is_alive()
    assert await run(runner, lambda: "alive") == "alive"
    release.set()
    await asyncio.to_thread(stuck[0].join, SECONDS)
    assert not stuck[0].is_alive()


async def test_an_async_function_is_cancelled_at_its_limit(runner):
    cancelled = threading.Event()

    async def waits():
        try:
            await asyncio.sleep(30)
        finally:
            cancelled.set()

    with pytest.raises(CallOverdue):
        await run(runner, waits, 0.05)
    assert cancelled.is_set()


async def test_blocking_jobs_get_threads_of_their_own_and_lose_them_again(runner):
    barrier = threading.Barrier(4)
    await asyncio.gather(*(run(runner, lambda: barrier.wait(SECONDS)) for _ in range(4)))
    assert runner.threads <= 5
    async with asyncio.timeout(SECONDS):
        while runner.threads > 1:
            await run(runner, lambda: None)


@pytest.mark.slow
async def test_interrupts_that_race_with_the_end_of_a_call_hit_nothing_else(runner):
    """Calls whose length is close to their limit: each ends as a result or as overdue, and the runner lives on."""

    def spin(seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        return "done"

    outcomes = {"done": 0, "overdue": 0}
    for i in range(300):
        try:
            outcomes[await run(runner, spin, 0.02, 0.015 + (i % 20) / 1000)] += 1
        except CallOverdue:
            outcomes["overdue"] += 1
    assert sum(outcomes.values()) == 300
    assert await run(runner, lambda: "alive") == "alive"
