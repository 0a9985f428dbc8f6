"""Kept processes where no kernel bounds them: what takes more than its share is killed, whether or not it is read."""

import asyncio
import shutil
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from envfarm.core.environment import Environment
from envfarm.core.errors import IsolationError
from envfarm.core.sandbox import SandboxProfile
from sandboxes.isolation import cgroups, mounts
from sandboxes.isolation.bwrap import python, require_bwrap
from sandboxes.isolation.processes.watch import Watch
from sandboxes.isolation.sandbox import slot_sandbox
from sandboxes.tools.shell import Shell

PROFILE = SandboxProfile(memory_bytes=64 * 2**20, disk_bytes=4 * 2**20, pids=32, exec_seconds=8.0)
# Processes and files have bounds of their own, so it takes several.
MEMORY = ["import os, time", "for _ in range(3): os.fork()", "x = bytearray(40 << 20)", "time.sleep(300)"]
DISK = ["import time", "for i in range(4): open(str(i), 'wb').write(bytes(2 << 20))", "time.sleep(300)"]
try:
    require_bwrap()
except IsolationError as error:
    pytestmark = pytest.mark.skip(reason=f"needs bubblewrap: {error}")


@pytest.fixture
async def unbounded(ground, monkeypatch):
    """A slot without control groups, whose files lie in a plain folder."""
    monkeypatch.setattr(cgroups, "_parents", dict)
    monkeypatch.setattr(mounts, "_private", False)
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # the ground itself has little room
    folder.chmod(0o711)  # noqa: ASYNC240
    made = slot_sandbox(folder, 11, PROFILE)
    await asyncio.to_thread(made.prepare)
    assert not made.controls & {"memory", "disk"}
    yield made
    await asyncio.to_thread(made.close)
    shutil.rmtree(folder)
    assert watchers() == []
    assert psutil.Process().children(recursive=True) == []


def watchers():
    return [thread for thread in threading.enumerate() if thread.name == "watch of a slot"]


async def until(true):
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 - others make it so
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("lines", [MEMORY, DISK], ids=["memory", "disk"])
async def test_a_process_that_takes_too_much_is_killed_though_nobody_reads_from_it(unbounded, lines):
    process = await unbounded.start([python(), "-I", "-c", "\n".join(lines)])
    await until(lambda: not process.running)
    said = await process.read()
    assert process.exit_code == 137, said


async def test_what_a_killed_process_said_last_can_still_be_read(unbounded):
    process = await unbounded.start([python(), "-I", "-c", "\n".join(["print('last', flush=True)", *MEMORY])])
    await until(lambda: not process.running)
    assert await process.read() == b"last\n"


async def test_one_thread_watches_all_processes_of_a_slot_and_ends_with_the_last_of_them(unbounded):
    processes = [await unbounded.start(["sleep", "300"]) for _ in range(3)]
    assert len(watchers()) == 1
    for process in processes[:2]:
        await process.close()
    assert processes[2].running
    processes[2].kill()
    await until(lambda: not watchers())
    again = await unbounded.start(["sleep", "300"])
    assert len(watchers()) == 1
    await asyncio.to_thread(unbounded.end_sessions)
    assert not again.running
    assert watchers() == []


async def test_a_job_in_the_background_is_watched_between_calls(unbounded):
    class Workshop(Environment):
        """Has a shell."""

        profile = PROFILE
        toolsets = (Shell(),)

    environment = Workshop()
    environment.equip(unbounded)
    shell = environment.toolset(Shell)
    await unbounded.write("eats.py", "\n".join(MEMORY).encode())
    assert await shell.bash("python3 eats.py & echo started") == "started"
    kept = shell._kept._process
    await until(lambda: not kept.running)
    assert await shell.bash("echo next") == "next"


async def test_where_the_kernel_bounds_everything_nobody_watches(ground):
    bounded = slot_sandbox(ground, 12, PROFILE)
    await asyncio.to_thread(bounded.prepare)
    if not {"memory", "disk"} <= bounded.controls:
        pytest.skip("needs control groups and mounts")
    await bounded.start(["sleep", "300"])
    assert watchers() == []
    await asyncio.to_thread(bounded.close)


class Still:
    """Runs until it is killed."""

    running = True

    def kill(self):
        self.running = False


async def test_what_cannot_be_looked_at_is_killed(caplog):
    def fails():
        raise OSError("no descriptor is left")

    watch, process = Watch(), Still()
    watch.add(process, fails)
    await until(lambda: not process.running)
    watch.end()
    assert "no descriptor is left" in caplog.text


def test_ending_a_watch_waits_for_a_look_that_goes_on():
    looking, go_on = threading.Event(), threading.Event()

    def slow():
        looking.set()
        return not go_on.wait(10)

    watch, process = Watch(), Still()
    watch.add(process, slow)
    assert looking.wait(10)
    threading.Timer(0.05, go_on.set).start()
    watch.end()
    assert go_on.is_set()
    assert process.running
