"""Hostile code in a sandbox: each attack fails, and within two seconds or so nothing of it is left."""

import asyncio
import os
import resource
import socket
import time
from pathlib import Path

import psutil
import pytest

from envfarm.core.errors import ToolError

pytestmark = pytest.mark.containment
LIMIT = 4.0  # seconds: two, and room for a busy machine


@pytest.fixture(autouse=True)
def nothing_is_left():
    start = time.monotonic()
    yield
    mine = psutil.Process()
    left = [p for p in mine.children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert left == []
    assert time.monotonic() - start < 2 * LIMIT


async def test_the_network_cannot_be_reached(run):
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    code = f"""
import socket
for address in (("127.0.0.1", {port}), ("1.1.1.1", 53), ("169.254.169.254", 80)):
    try:
        socket.create_connection(address, 1)
        print("reached", address)
    except OSError as error:
        print("no", error)
try:
    socket.getaddrinfo("example.org", 80)
    print("reached names")
except OSError:
    print("no names")
"""
    with server:
        result, output = await run(code)
    assert "reached" not in output
    assert [line[:3] for line in output.splitlines()] == ["no "] * 4
    assert result.exit_code == 0


async def test_unix_sockets_of_the_host_are_out_of_sight(run, tmp_path):
    address = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as hidden:
        server.bind(address)
        server.listen()
        hidden.bind("\0envfarm-containment")
        hidden.listen()
        code = f"""
import socket
for name in ({address!r}, "\\0envfarm-containment"):
    try:
        socket.socket(socket.AF_UNIX).connect(name)
        print("reached")
    except OSError as error:
        print("no")
"""
        _, output = await run(code)
    assert output.split() == ["no", "no"]


async def test_a_fork_bomb_ends_with_the_command(run):
    start = time.monotonic()
    result, _ = await run("import os\nwhile True:\n try: os.fork()\n except OSError: pass", seconds=1.0)
    assert result.timed_out
    assert time.monotonic() - start < LIMIT
    after, output = await run("print(6 * 7)")
    assert output == "42\n", after


async def test_ten_times_the_memory_is_not_to_be_had(run):
    result, output = await run("x = bytearray(1280 * 2**20); print('had it')")
    assert "had it" not in output
    assert result.exit_code != 0
    grow = "import mmap\nkeep = []\nwhile True:\n m = mmap.mmap(-1, 16 * 2**20); m.write(b'x' * len(m)); keep.append(m)"
    result, _ = await run(grow)
    assert result.exit_code != 0
    assert (await run("print('alive')"))[1] == "alive\n"


async def test_a_full_disk_is_the_sandboxes_own(run, ground):
    code = """
import os
total = 0
try:
    for i in range(1000):
        with open(f"/FOLDER/f{i}", "wb") as f:
            total += f.write(b"x" * 2**20)
except OSError:
    pass
print(total <= 9 * 2**20, total)
"""
    for folder in ("tmp", "dev/shm", "workspace"):
        _, output = await run(code.replace("FOLDER", folder), seconds=2.0)
        used = await asyncio.to_thread(lambda: sum(f.stat().st_size for f in ground.glob("slot-*/**/*") if f.is_file()))
        assert output.startswith("True") or (folder == "workspace" and used < 256 * 2**20), output


async def test_files_of_the_host_cannot_be_read_or_written(run, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("for no one")
    paths = [secret, Path(__file__), "/etc/shadow", "/etc/passwd", "/root/.ssh", "/home", "/var", "/sys", "/proc/kcore"]
    code = f"""
import os
for path in {[str(path) for path in paths]!r}:
    try:
        print("read", path, open(path).read(10) if not os.path.isdir(path) else os.listdir(path))
    except OSError:
        pass
kernel = ["/proc/sys/kernel/" + name for name in ("hostname", "core_pattern", "modprobe")]
for path in ("/usr/x", "/bin/x", "/x", "/etc/x", "/dev/x", *kernel):
    try:
        open(path, "w").write(open(path).read() if path in kernel else "x")
        print("wrote", path)
    except OSError:
        pass
for path in ("/dev/null", "/usr/bin/env", "/proc/sys/kernel/hostname"):
    try:
        os.chmod(path, os.stat(path).st_mode)
        print("changed", path)
    except OSError:
        pass
print("done")
"""
    _, output = await run(code)
    assert output == "done\n"


async def test_workspaces_of_neighbours_are_out_of_sight(run, neighbour, ground):
    await neighbour.write("secret.txt", b"theirs")
    code = f"""
import os
found = []
for root in ("/workspace/..", "/tmp", {str(ground)!r}):
    for folder, _, files in os.walk(root):
        if folder.startswith(("/proc", "/usr", "/sys")) or "/../usr" in folder or "/../proc" in folder:
            continue
        found += [f for f in files if f == "secret.txt"]
print(found)
"""
    _, output = await run(code)
    assert output == "[]\n"
    assert await neighbour.read("secret.txt") == b"theirs"


async def test_processes_of_the_host_are_out_of_sight_and_out_of_reach(run, neighbour):
    other = asyncio.create_task(neighbour.exec(["/bin/sleep", "1.2"]))
    code = f"""
import os, signal
print(sorted(int(p) for p in os.listdir("/proc") if p.isdigit())[-1] < 50)
print(os.path.exists("/proc/{os.getpid()}"))
for pid in (1, {os.getpid()}, {os.getppid()}, -1):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError as error:
        print(type(error).__name__)
"""
    _, output = await run(code)
    assert output.startswith("True\nFalse\n")
    assert psutil.pid_exists(os.getpid())
    assert (await other).exit_code == 0


async def test_privileges_and_new_namespaces_are_not_to_be_had(run):
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(os.getuid(), libc.unshare(0x10000000), libc.unshare(0x00020000), libc.mount(b"x", b"/tmp", b"tmpfs", 0, None))
status = open("/proc/self/status").read()
print([l.split()[1] for l in status.splitlines() if l.startswith(("CapEff", "CapBnd", "NoNewPrivs"))])
try:
    os.setuid(0); print("root")
except OSError:
    print("not root")
"""
    _, output = await run(code)
    assert output == "65534 -1 -1 -1\n['0000000000000000', '0000000000000000', '1']\nnot root\n"


async def test_links_do_not_lead_files_out_of_the_workspace(sandbox, run, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("outside")
    await run(
        f"import os\nos.symlink({str(outside)!r}, 'folder')\nos.symlink({str(outside / 'file')!r}, 'file')\n"
        "os.symlink('/etc/passwd', 'passwd')\nos.mkfifo('pipe')\nos.mkdir('deep'); os.symlink('..', 'deep/up')"
    )
    for name in ("folder/file", "file", "passwd", "pipe", "../outside/file", "/etc/passwd", "deep/up/file", "", "a\0b"):
        with pytest.raises(ToolError):
            await sandbox.read(name)
        with pytest.raises(ToolError):
            await sandbox.write(name, b"broken out")
    assert (outside / "file").read_text() == "outside"
    await sandbox.write("deep/er/file", b"fine")
    assert await sandbox.read("deep/er/file", 2) == b"fi"


async def test_endless_output_without_a_newline_stays_small(run, sandbox):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    result = await sandbox.exec(["/bin/sh", "-c", "tr '\\0' x < /dev/zero"])
    assert time.monotonic() - start < LIMIT
    assert result.truncated
    assert len(result.stdout) < 17_000
    assert result.stdout.startswith(b"xxx")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB


async def test_a_gibibyte_on_stdout_stays_small(sandbox):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = await sandbox.exec(["/bin/sh", "-c", "head -c 1073741824 /dev/zero; echo end 1>&2"])
    assert result.truncated
    assert len(result.stdout) < 17_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024


async def test_what_is_left_running_ends_with_the_command(run):
    code = "import subprocess\nsubprocess.Popen(['/bin/sleep', '100'], start_new_session=True)\nprint('left')"
    result, output = await run(code)
    assert output == "left\n"
    assert result.exit_code == 0
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["/bin/sleep", "100"]]


async def test_a_command_that_ignores_signals_is_killed_at_its_time_limit(run):
    code = "import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\nwhile True: time.sleep(1)"
    result, _ = await run(code, seconds=0.5)
    assert result.timed_out
    assert result.exit_code is None
    assert result.seconds < LIMIT


async def test_a_cancelled_command_leaves_nothing(sandbox):
    task = asyncio.create_task(sandbox.exec(["/bin/sleep", "50"]))
    async with asyncio.timeout(5):
        while not [c for c in psutil.Process().children(recursive=True) if c.name() == "sleep"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_command_has_no_terminal_to_type_into(run):
    _, output = await run("import os\ntry:\n os.open('/dev/tty', 2); print('terminal')\nexcept OSError: print('none')")
    assert output == "none\n"


async def test_a_command_inherits_no_descriptor_of_the_host(run):
    _, output = await run("import os\nprint([f for f in os.listdir('/proc/self/fd') if int(f) > 2])")
    assert output in ("['3']\n", "[]\n")  # the one that lists


async def test_input_output_and_exit_status_pass_through(sandbox):
    await sandbox.write("a.txt", b"from the host")
    result = await sandbox.exec(
        ["/bin/sh", "-c", "cat; cat a.txt; echo $WORD; pwd; echo oops >&2; exit 5"], stdin=b"in ", env={"WORD": "hi"}
    )
    assert (result.exit_code, result.stdout, result.stderr) == (5, b"in from the hosthi\n/workspace\n", b"oops\n")


async def test_a_program_that_does_not_exist_is_an_exit_status(sandbox):
    assert (await sandbox.exec(["no-such-program"])).exit_code == 127


def test_no_control_group_is_left_behind():
    found = [p for p in Path("/sys/fs/cgroup").glob("*/envfarm-*") if f"-{os.getpid()}-" in p.name]
    assert found == []
