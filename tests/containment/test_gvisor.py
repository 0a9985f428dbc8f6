"""Hostile programs under gVisor: what they do to the machine is held, what they do to their own kernel is theirs."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from envfarm.core.environment import Environment
from envfarm.core.errors import IsolationError
from envfarm.core.sandbox import Isolation, SandboxProfile
from sandboxes.isolation.gvisor import require_runsc
from sandboxes.isolation.sandbox import slot_sandbox
from sandboxes.tools.python import Python
from sandboxes.tools.shell import Shell
from sandboxes.tools.sql import Sql

sys.path.insert(0, str(Path(__file__).parent))
from hostile import ATTACKS

# What these ask for happens inside the kernel that the command has for itself, and ends with it.
ITS_OWN_KERNEL = {
    "more processes than allowed": "the bound is the control group's, and there the kernel itself ends",
    "writing where nothing is one's own": "/dev is its kernel's own, in memory",
    "raising its own bounds": "processor time is bounded outside",
    "processes of the host": "it is its own first process, and ends itself",
    "tracing another process": "only its own",
    "typing into a terminal": "there is none but its kernel's own",
    "devices": "gVisor's own, with nothing behind them",
    "namespaces in namespaces": "of its own kernel",
    "parts of the kernel with a history": "another kernel, with another history",
    "empty files without end": "in the memory of its kernel, which is bounded outside",
    "semaphores and messages": "in the memory of its kernel, which is bounded outside",
    "the memory of page tables": "in the memory of its kernel, which is bounded outside",
    "the memory of sockets": "in the memory of its kernel, which is bounded outside",
    "privileges": "its kernel does not tell of ambient ones",
}
PROFILE = SandboxProfile(isolation=Isolation.GVISOR, disk_bytes=8 * 2**20, pids=32, exec_seconds=20)
pytestmark = pytest.mark.containment


@pytest.fixture(scope="module")
def runsc():
    try:
        return require_runsc()
    except IsolationError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def gvisor_arena(runsc):
    argv = [sys.executable, str(Path(__file__).with_name("arena.py")), "--isolation", "gvisor"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.stdin.close()
    assert process.wait(30) == 0
    process.stdout.close()


@pytest.fixture
async def deep(runsc, ground):
    made = slot_sandbox(ground, 2, PROFILE)
    await asyncio.to_thread(made.prepare)
    yield made
    made.close()
    assert [p for p in psutil.process_iter(["name"]) if "runsc" in p.name() and p.ppid() == psutil.Process().pid] == []


def test_every_exception_is_an_attack_that_there_is():
    assert ITS_OWN_KERNEL.keys() <= {attack.name for attack in ATTACKS}


@pytest.mark.parametrize("hostile", ATTACKS, ids=lambda attack: attack.name)
def test_a_hostile_program_in_a_kernel_of_its_own_is_held(gvisor_arena, hostile):
    gvisor_arena.stdin.write(f"{hostile.name}\n")
    gvisor_arena.stdin.flush()
    told = json.loads(gvisor_arena.stdout.readline())
    assert "error" not in told, told["error"]
    assert told["isolation"] == "gvisor"
    if hostile.name not in ITS_OWN_KERNEL:
        assert told["breach"] == ""
    assert told["alive"], "the slot cannot be used any more"
    assert told["left"] == [], "processes are left"
    assert told["seconds"] < 4.0


async def test_commands_see_gvisors_kernel_and_the_slots_files(deep):
    await deep.write("in.txt", b"from the host ")
    result = await deep.exec(
        ["/bin/sh", "-c", "dmesg | head -1; cat in.txt -; echo out > out.txt; echo oops >&2; exit 5"],
        stdin=b"and stdin",
    )
    assert result.exit_code == 5
    assert b"Starting gVisor" in result.stdout
    assert result.stdout.endswith(b"from the host and stdin")
    assert result.stderr == b"oops\n"
    assert await deep.read("out.txt") == b"out\n"


async def test_a_program_that_does_not_exist_has_a_shells_status_under_gvisor_too(deep):
    assert (await deep.exec(["no-such-program"])).exit_code == 127
    assert (await deep.exec(["/workspace"])).exit_code == 126
    assert (await deep.exec(["/bin/sh", "-c", "exit 128"])).exit_code == 128


async def test_the_time_limit_ends_the_kernel_with_all_in_it(deep):
    result = await deep.exec(["/bin/sh", "-c", "sleep 100 & exec sleep 100"], seconds=0.6)
    assert result.timed_out
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["/bin/sleep", "100"]]


async def test_a_long_lived_process_runs_under_gvisor(deep):
    process = await deep.start(["/bin/sh", "-c", "while read line; do echo got $line; done"])
    await process.write(b"one\n")
    async with asyncio.timeout(20):
        assert await process.read() == b"got one\n"
    await process.close()


class Workshop(Environment):
    """Has a shell with little time, and Python."""

    profile = PROFILE
    toolsets = (Shell(seconds=2.0), Python(seconds=2.0), Sql())


@pytest.fixture
def workshop(deep):
    made = Workshop()
    made.equip(deep)
    return made


async def test_a_shell_is_kept_under_gvisor_and_begins_anew_after_a_time_limit(workshop):
    shell = workshop.toolset(Shell)
    assert await shell.bash("x=kept; cd /tmp; echo made > /workspace/file") == "(no output)"
    assert await shell.bash("echo $x $PWD; false") == "kept /tmp\n[exit code 1]"
    said = await shell.bash("sleep 1601")
    assert "[stopped: time limit of 2 s" in said
    assert "the next call starts a new one" in said
    assert "files are kept" in said
    assert await shell.bash('echo "<$x>" $PWD; cat file') == "<> /workspace\nmade"


async def test_python_and_sql_are_kept_under_gvisor(workshop):
    python = workshop.toolset(Python).python
    assert await python("x = 20\nx") == "20"
    assert await python("x + 1") == "21"
    said = await python("while True: pass")
    assert "stopped: time limit of 2 s" in said
    assert "the next call starts it anew" in said
    assert "NameError" in await python("x")
    sql = workshop.toolset(Sql)
    assert await sql.execute_sql("CREATE TABLE t (a); INSERT INTO t VALUES (1)") == "OK\n\nOK, 1 row changed"
    assert await sql.rows("SELECT a FROM t") == [(1,)]


async def test_a_network_is_refused_under_gvisor(runsc, ground):
    box = slot_sandbox(ground, 3, SandboxProfile(isolation=Isolation.GVISOR, network=True))
    with pytest.raises(IsolationError, match="no network"):
        await box.exec(["/bin/true"])
    box.close()


def test_without_runsc_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    require_runsc.cache_clear()
    try:
        with pytest.raises(IsolationError, match="apt-get install runsc"):
            require_runsc()
    finally:
        require_runsc.cache_clear()
