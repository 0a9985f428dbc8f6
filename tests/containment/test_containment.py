"""How confined commands start, speak and end, and what they leave behind: nothing."""

import asyncio
import os
from pathlib import Path

import psutil
import pytest

from envfarm.core.errors import SandboxError, ToolError
from sandboxes.isolation import bwrap
from sandboxes.isolation.files.workspace import Workspace

pytestmark = pytest.mark.containment


@pytest.fixture(autouse=True)
def nothing_is_left():
    before, others = _open_descriptors(), set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= others
    assert _open_descriptors() <= before + 2  # an event loop's own, perhaps


def _open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_what_is_left_running_ends_with_the_command(run):
    code = "import subprocess\nsubprocess.Popen(['/bin/sleep', '100'], start_new_session=True)\nprint('left')"
    result, output = await run(code)
    assert output == "left\n"
    assert result.exit_code == 0
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["/bin/sleep", "100"]]


async def test_a_cancelled_command_leaves_nothing(sandbox):
    task = asyncio.create_task(sandbox.exec(["/bin/sleep", "50"]))
    async with asyncio.timeout(5):
        while not [c for c in psutil.Process().children(recursive=True) if c.name() == "sleep"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_command_that_is_cancelled_while_it_starts_leaves_nothing(sandbox):
    for delay in (0.0, 0.001, 0.002, 0.004, 0.006, 0.008, 0.012):
        task = asyncio.create_task(sandbox.exec(["/bin/sleep", "50"]))
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await sandbox.exec(["/bin/true"])).exit_code == 0


async def test_many_commands_do_not_wear_a_slot_out(sandbox):
    for _ in range(3):
        results = await asyncio.gather(*(sandbox.exec(["/bin/sh", "-c", "sleep 0 & exit 3"]) for _ in range(8)))
        assert [result.exit_code for result in results] == [3] * 8


async def test_input_output_and_exit_status_pass_through(sandbox):
    await sandbox.write("a.txt", b"from the host")
    result = await sandbox.exec(
        ["/bin/sh", "-c", "cat; cat a.txt; echo $WORD; pwd; echo oops >&2; exit 5"], stdin=b"in ", env={"WORD": "hi"}
    )
    assert (result.exit_code, result.stdout, result.stderr) == (5, b"in from the hosthi\n/workspace\n", b"oops\n")


async def test_a_command_that_dies_of_a_signal_has_a_shells_status_for_it(sandbox):
    for signal, status in (("TERM", 143), ("ABRT", 134), ("KILL", 137), ("SEGV", 139)):
        assert (await sandbox.exec(["/bin/sh", "-c", f"kill -{signal} $$"])).exit_code == status


async def test_a_program_that_does_not_exist_is_an_exit_status(sandbox):
    missing = await sandbox.exec(["no-such-program"])
    assert missing.exit_code == 127
    assert b"no-such-program" in missing.stderr
    await sandbox.write("data.txt", b"no program")
    assert (await sandbox.exec(["/workspace/data.txt"])).exit_code == 126
    pretended = await sandbox.exec(["/bin/sh", "-c", "echo bwrap: execvp x: No such file >&2; exit 1"])
    assert pretended.exit_code == 1


async def test_a_command_that_cannot_be_set_up_is_the_sandboxes_failure(sandbox, monkeypatch):
    monkeypatch.setattr(Workspace, "workdir", "/no/such/folder")
    with pytest.raises(SandboxError, match=r"could not be set up: bwrap: .*no/such/folder"):
        await sandbox.exec(["/bin/true"])


async def test_a_command_sees_no_variable_but_those_it_is_given(sandbox):
    result = await sandbox.exec(["/usr/bin/env"], env={"WORD": "hi"})
    names = {line.partition("=")[0] for line in result.stdout.decode().splitlines()}
    assert names == {*bwrap.environment(sandbox._workspace), "WORD", "PWD"}


async def test_links_lead_nobody_to_files_of_the_host(sandbox, run, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("outside")
    os.link(outside / "file", outside / "hard")
    code = f"import os\nfrom pathlib import Path\nhost = {str(outside)!r}\n"
    code += "os.symlink(host, 'folder'); os.symlink(host + '/file', 'file'); os.symlink('/etc/passwd', 'passwd')\n"
    code += "os.symlink('../../../../../..' + host, 'up'); os.symlink('/proc/1/root' + host, 'proc')\n"
    code += "os.symlink('loop', 'loop'); os.mkfifo('pipe')\n"
    code += "for s in (host + '/file', '/proc/1/root' + host + '/file'):\n"
    code += " try: os.link(s, 'hard'); print('linked')\n except OSError: print('no')"
    _, output = await run(code)
    assert output == "no\nno\n"
    for name in ("folder/file", "file", "passwd", "up/file", "proc/file", "loop", "pipe", "../../../etc/passwd"):
        with pytest.raises(ToolError):
            await sandbox.read(name)
    for name in ("folder/file", "file", "up/file", "proc/file", "loop", "pipe"):
        try:
            await sandbox.write(name, b"broken out")
        except ToolError:
            continue
    assert [path.read_text() for path in sorted(outside.iterdir())] == ["outside", "outside"]


def test_no_control_group_is_left_behind():
    found = [p for p in Path("/sys/fs/cgroup").glob("**/envfarm-*") if f"-{os.getpid()}-" in p.name]
    assert found == []
