"""Processes that go on between calls: fed, read, cleared of their children, ended, and nothing of them left."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading

import psutil
import pytest

from envfarm.core.errors import IsolationError, ToolError
from envfarm.core.sandbox import Isolation, SandboxProfile
from sandboxes.isolation import cgroups, mounts
from sandboxes.isolation.bwrap import python, require_bwrap
from sandboxes.isolation.sandbox import slot_sandbox

PROFILE = SandboxProfile(memory_bytes=128 * 2**20, disk_bytes=8 * 2**20, pids=32, exec_seconds=2.0, output_bytes=16_384)
SH = ["/bin/sh"]
try:
    require_bwrap()
except IsolationError as error:
    pytestmark = pytest.mark.skip(reason=f"needs bubblewrap: {error}")


@pytest.fixture
async def sandbox(ground):
    made = slot_sandbox(ground, 0, PROFILE)
    await asyncio.to_thread(made.prepare)
    yield made
    await asyncio.to_thread(made.close)


def state():
    """Descriptors, processes and tasks that there are now."""
    mine = psutil.Process()
    return mine.num_fds(), len(mine.children(recursive=True)), len(asyncio.all_tasks())


async def lines(process, count):
    said = b""
    async with asyncio.timeout(10):
        while said.count(b"\n") < count:
            part = await process.read()
            assert part, said
            said += part
    return said


async def to_end(process):
    said = b""
    async with asyncio.timeout(10):
        while part := await process.read():
            said += part
    return said


async def until(true):
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def found(*words):
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == list(words)]


async def test_a_process_answers_call_after_call_and_keeps_its_state(sandbox):
    process = await sandbox.start(SH, env={"WORD": "hi"})
    await process.write(b"x=1; echo $WORD; pwd\n")
    assert await lines(process, 2) == b"hi\n/workspace\n"
    await process.write(b"echo $x >&2\n")
    assert await lines(process, 1) == b"1\n"
    assert process.exit_code is None
    await process.write(b"exit 3\n")
    assert await to_end(process) == b""
    await until(lambda: process.exit_code == 3)
    with pytest.raises(ToolError, match="has ended"):
        await process.write(b"echo\n")


async def test_errors_can_be_kept_apart(sandbox):
    process = await sandbox.start(["/bin/sh", "-c", "echo out; echo err >&2"], apart=True)
    assert await to_end(process) == b"out\n"
    assert await process.read_errors() == b"err\n"
    assert await process.read_errors() == b""


async def test_nothing_is_left_after_close_after_cancel_and_after_an_end_of_its_own(sandbox):
    await (await sandbox.start(SH)).close()  # whatever is made once
    before = state()
    for _ in range(5):
        process = await sandbox.start(SH)
        await process.write(b"sleep 100 & setsid sleep 100 & echo up\n")
        await lines(process, 1)
        await process.close()
        await process.close()
        assert await process.read() == b""
    assert state() == before

    process = await sandbox.start(SH)
    reading = asyncio.create_task(process.read())
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await process.write(b"echo still here\n")
    assert await lines(process, 1) == b"still here\n"
    closing = asyncio.create_task(process.close())
    await asyncio.sleep(0)
    closing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await closing
    await until(lambda: process.exit_code is not None)
    await until(lambda: state() == before)

    starting = asyncio.create_task(sandbox.start(SH))
    await asyncio.sleep(0)
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await (await starting).close()
    await until(lambda: state() == before)

    process = await sandbox.start(["/bin/true"])
    await to_end(process)
    await until(lambda: process.exit_code == 0)
    assert state() == before


async def test_a_flooding_process_waits_and_takes_no_memory_here(sandbox):
    process = await sandbox.start(["/bin/sh", "-c", "yes"])
    await process.read()
    before = psutil.Process().memory_info().rss
    inside = next(p for p in psutil.Process().children(recursive=True) if p.name() == "yes")
    await until(lambda: inside.status() == psutil.STATUS_SLEEPING)  # in its write
    async with asyncio.timeout(10):
        for _ in range(500):
            assert len(await process.read(1000)) <= 1000
    assert psutil.Process().memory_info().rss - before < 8 * 2**20
    await process.close()


async def test_input_that_nobody_reads_waits_and_has_an_end(sandbox):
    process = await sandbox.start(["/bin/sleep", "100"])
    with pytest.raises(ToolError, match="has not read its input"):
        await process.write(b"x" * 2**20)
    await process.close()


async def test_large_input_goes_through_while_output_is_read(sandbox):
    process = await sandbox.start(["/bin/cat"])
    data = os.urandom(2**20)
    writing = asyncio.create_task(process.write(data))
    said = b""
    async with asyncio.timeout(10):
        while len(said) < len(data):
            said += await process.read()
    await writing
    assert said == data
    await process.close()


HIDING = """
import os, sys, time
def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.execv("/bin/sleep", ["sleep", "1234"])
        os._exit(0)
for _ in range(3):
    daemon()
"""


async def test_children_are_killed_wherever_they_hide_and_the_command_goes_on(sandbox):
    process = await sandbox.start(SH)
    await process.write(b"x=kept; sleep 1234 & nohup setsid sleep 1234 >/dev/null 2>&1 &\n")
    await process.write(f"{python()} -I -c '{HIDING}'; echo done\n".encode())
    await lines(process, 1)
    await until(lambda: len(found("sleep", "1234")) == 5)
    assert len(process.children()) == 5
    await process.kill_children()
    assert found("sleep", "1234") == []
    assert process.children() == frozenset()
    await process.write(b"echo $x\n")
    assert b"kept" in await lines(process, 1)
    await process.close()


async def test_children_of_before_can_be_spared_with_what_they_start(sandbox):
    process = await sandbox.start(SH)
    await process.write(b"sh -c 'sleep 1235; :' & echo up\n")
    await lines(process, 1)
    spare = process.children()
    await process.write(b"sleep 1236 &\n")
    await until(lambda: found("sleep", "1235") and found("sleep", "1236"))
    await process.kill_children(spare)
    assert found("sleep", "1236") == []
    assert found("sleep", "1235")
    await process.close()
    assert found("sleep", "1235") == []


async def test_a_fork_bomb_of_children_ends(sandbox):
    process = await sandbox.start(SH)
    await process.write(b"bomb() { bomb & bomb & }; (bomb) 2>/dev/null; echo lit\n")
    await lines(process, 1)
    await process.kill_children()
    await process.write(b"echo alive\n")
    async with asyncio.timeout(10):
        said = b""
        while b"alive" not in said:
            said += await process.read()
    assert process.children() == frozenset()
    await process.close()


async def test_a_child_whose_first_thread_is_dead_is_found(sandbox):
    code = (
        "import ctypes, threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "print('up', flush=True)\nctypes.CDLL(None).pthread_exit(None)"
    )
    process = await sandbox.start(SH)
    await process.write(f'{python()} -I -c "{code}" &\n'.encode())
    await lines(process, 1)
    child = next(p for p in psutil.Process().children(recursive=True) if "python" in p.name())
    await until(lambda: child.status() == psutil.STATUS_ZOMBIE)
    assert len(process.children()) == 1
    await process.kill_children()
    assert process.children() == frozenset()
    await process.close()


async def test_a_signal_reaches_the_command_alone(sandbox):
    process = await sandbox.start(SH)
    await process.write(b"trap 'echo got it' USR1; sleep 1237 & echo up\n")
    await lines(process, 1)
    process.signal(signal.SIGUSR1)
    await process.write(b":\n")
    assert await lines(process, 1) == b"got it\n"
    await until(lambda: found("sleep", "1237"))
    await process.close()


async def test_emptying_the_slot_from_another_thread_ends_its_processes_and_wakes_who_reads(sandbox):
    process = await sandbox.start(SH)
    reading = asyncio.create_task(process.read())
    await asyncio.sleep(0)
    thread = threading.Thread(target=sandbox.empty)
    thread.start()
    async with asyncio.timeout(10):
        assert await reading == b""
    await asyncio.to_thread(thread.join)
    assert process.exit_code is not None
    assert psutil.Process().children(recursive=True) == []


async def test_restoring_files_ends_processes(sandbox):
    snapshot = await sandbox.snapshot()
    process = await sandbox.start(SH)
    await sandbox.restore(snapshot)
    assert process.exit_code is not None


async def test_processes_share_the_bounds_of_the_slot_with_other_commands(sandbox):
    if "pids" not in sandbox.controls:
        pytest.skip("needs a control group for processes")
    process = await sandbox.start(SH)
    await process.write(b"for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do sleep 100 & done; echo up\n")
    await lines(process, 1)
    result = await sandbox.exec(["/bin/sh", "-c", "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 0.2 & done; wait"])
    assert b"fork" in result.stderr
    await process.close()


async def test_a_program_that_is_not_there_is_an_exit_status(sandbox):
    process = await sandbox.start(["no-such-program"])
    await to_end(process)
    await until(lambda: process.exit_code == 127)


async def test_without_isolation_processes_and_their_children_end_as_well(ground):
    import msgspec

    sandbox = slot_sandbox(ground, 3, msgspec.structs.replace(PROFILE, isolation=Isolation.NONE))
    process = await sandbox.start(SH)
    await process.write(b"sleep 1238 & echo up\n")
    await lines(process, 1)
    await process.kill_children()
    await until(lambda: not found("sleep", "1238"))
    await process.write(b"echo on\n")
    assert await lines(process, 1) == b"on\n"
    await process.close()
    await asyncio.to_thread(sandbox.close)


def buried():
    """Whether no child is left, once those are buried that came to us as orphans."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


async def test_processes_end_with_the_host_that_is_killed():
    code = """
        import asyncio, sys
        from sandboxes.isolation import mounts
        from sandboxes.isolation.sandbox import slot_sandbox
        from envfarm.core.sandbox import SandboxProfile
        async def main():
            sandbox = slot_sandbox(mounts.own_ground(), 5, SandboxProfile(memory_bytes=128 * 2**20, pids=16))
            process = await sandbox.start(["/bin/sh"])
            await process.write(b"setsid sleep 1239 & sleep 1239 & echo up\\n")
            print((await process.read()).decode(), end="", flush=True)
            await asyncio.sleep(100)
        asyncio.run(main())
    """
    host = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE
    )
    assert await asyncio.to_thread(host.stdout.readline) == b"up\n"
    await until(lambda: len(found("sleep", "1239")) == 2)
    host.kill()
    host.wait()
    host.stdout.close()
    await until(lambda: not found("sleep", "1239"))
    await until(buried)
    mounts.sweep()
    cgroups.sweep()
