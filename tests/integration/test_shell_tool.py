"""The shell that models use: what is kept, what is cut, what is stopped, and what it survives."""

import asyncio
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from envfarm.core.environment import Environment
from envfarm.core.errors import IsolationError, ToolError
from envfarm.core.sandbox import SandboxProfile
from envfarm.core.task import Limits
from sandboxes.isolation.bwrap import require_bwrap
from sandboxes.isolation.sandbox import slot_sandbox
from sandboxes.isolation.surroundings import Surroundings
from sandboxes.tools.shell import Shell

PROFILE = SandboxProfile(memory_bytes=256 * 2**20, disk_bytes=8 * 2**20, pids=48, exec_seconds=8.0)
try:
    require_bwrap()
except IsolationError as error:
    pytestmark = pytest.mark.skip(reason=f"needs bubblewrap: {error}")
if shutil.which("bash") is None:
    pytestmark = pytest.mark.skip(reason="needs bash")


class Workshop(Environment):
    """Has a shell."""

    profile = PROFILE
    limits = Limits(result_bytes=4096)
    toolsets = (Shell(seconds=4.0),)


class Hasty(Workshop):
    """Has a shell with little time."""

    toolsets = (Shell(seconds=0.7),)


@pytest.fixture
async def sandbox(ground):
    made = slot_sandbox(ground, 0, PROFILE)
    await asyncio.to_thread(made.prepare)
    yield made
    await asyncio.to_thread(made.close)
    assert psutil.Process().children(recursive=True) == []


def equipped(cls, sandbox):
    environment = cls()
    environment.equip(sandbox)
    return environment.toolset(Shell)


@pytest.fixture
def shell(sandbox):
    return equipped(Workshop, sandbox)


@pytest.fixture
def hasty(sandbox):
    return equipped(Hasty, sandbox)


def image(folder, *programs):
    """A root with ``programs`` of this machine, their libraries, and nothing else."""
    for name in ("bin", "proc", "dev", "tmp", "workspace"):
        (folder / name).mkdir(parents=True)
    for program in programs:
        source = shutil.which(program)
        shutil.copy(source, folder / "bin" / program)
        if program == "dash":
            (folder / "bin/sh").symlink_to("dash")
        said = subprocess.run(["ldd", source], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+) \(0x", said):
            target = folder / library.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    return folder


@pytest.fixture
async def imaged(ground, tmp_path_factory):
    """Toolsets in an image of given programs."""
    made = []

    async def with_programs(cls, *programs):
        root = Path(tempfile.mkdtemp(dir="/tmp"))
        image(root, *programs)
        sandbox = slot_sandbox(ground, 20 + len(made), PROFILE, Surroundings(image="tiny", root=root))
        made.append((sandbox, root))
        await asyncio.to_thread(sandbox.prepare)
        return equipped(cls, sandbox)

    yield with_programs
    for sandbox, root in made:
        await asyncio.to_thread(sandbox.close)
        shutil.rmtree(root)


def found(*words):
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == list(words)]


async def test_folder_variables_functions_and_status_are_kept(shell):
    assert await shell.bash("mkdir d; cd d; x=5; export y=6; f() { echo f $1; }; shopt -s nullglob") == "(no output)"
    assert await shell.bash("pwd; echo $x; sh -c 'echo $y'; f 7; echo *.none") == "/workspace/d\n5\n6\nf 7"
    assert await shell.bash("(exit 3)") == "[exit code 3]"
    assert await shell.bash("echo $?") == "3"
    assert await shell.bash("echo $?") == "0"


async def test_output_and_errors_come_together_with_a_status_that_is_not_zero(shell):
    assert await shell.bash("echo a; echo b >&2; echo c; false") == "a\nb\nc\n[exit code 1]"
    assert "command not found" in await shell.bash("no-such-program")


async def test_commands_of_many_lines_here_documents_and_quotes_work(shell):
    assert await shell.bash('for i in 1 2\ndo\n  echo "it\'s $i"\ndone') == "it's 1\nit's 2"
    assert await shell.bash("cat <<'EOF'\n$x `y` \"z\" '\\\nEOF\necho after") == '$x `y` "z" \'\\\nafter'
    assert await shell.bash("echo 'é ü 漢'; echo '!!' \"!x\"") == "é ü 漢\n!! !x"


@pytest.mark.parametrize("broken", ["echo 'open", 'echo "open', "for i in 1 2", "if true; then", "echo )", "$((", "`"])
async def test_an_error_of_syntax_is_told_and_the_shell_goes_on(shell, broken):
    await shell.bash("x=kept")
    said = await shell.bash(broken)
    assert "syntax error" in said or "unexpected EOF" in said or "unexpected end of file" in said, said
    assert await shell.bash("echo $x") == "kept"


async def test_there_is_no_input_no_prompt_and_no_terminal(shell):
    assert await shell.bash('cat; read x; echo "<$x>"; tty; [ -t 0 ] || [ -t 1 ] || echo none') == "<>\nnot a tty\nnone"


async def test_what_takes_too_long_is_stopped_with_all_it_started_and_state_stays(hasty):
    await hasty.bash("x=kept; cd /tmp")
    for command in (
        "sleep 1301",
        "setsid sleep 1301 & (setsid sleep 1301 &) ; sleep 1301; echo went on",
        "while true; do sleep 1301; done; echo went on",
        "f() { while true; do sleep 0.01; done; }; f; echo went on",
        "while :; do :; done",
        "yes | sleep 1301 | cat",
        "trap '' INT; sleep 1301",
        "bash -c 'trap \"\" INT TERM; sleep 1301'; echo went on",
    ):
        start = time.monotonic()
        said = await hasty.bash(command)
        if command.startswith("trap"):
            await hasty.bash("x=kept; cd /tmp")
        assert "[stopped: time limit of 0.7 s" in said, (command, said)
        assert "went on" not in said, command
        assert time.monotonic() - start < 4
        assert found("sleep", "1301") == []
        assert await hasty.bash("echo $x $PWD") == "kept /tmp", command


async def test_what_an_earlier_command_left_running_outlives_a_later_ones_time_limit(hasty):
    await hasty.bash("sleep 1302 &")
    assert "stopped" in await hasty.bash("sleep 1303")
    assert found("sleep", "1302")
    assert await hasty.bash("kill %1; wait; echo $?") == "0"


async def test_jobs_in_the_background_return_at_once_and_disturb_no_later_output(shell):
    start = time.monotonic()
    assert await shell.bash("(while sleep 0.01; do echo noise; echo noise >&2; done) & echo started") == "started"
    assert time.monotonic() - start < 2
    for i in range(5):
        assert await shell.bash(f"sleep 0.05; echo {i}") == str(i)
    assert await shell.bash("kill $!; wait $! ; echo $?") == "143"
    await shell.bash("(sleep 0.05; echo late) &")
    await shell.bash("wait")
    assert await shell.bash("echo fine") == "fine"


async def test_a_job_whose_output_nobody_reads_any_more_goes_on(shell):
    await shell.bash("(for i in $(seq 1 20000); do echo $i; done; echo done > finished) &")
    assert await shell.bash("wait; cat finished") == "done"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("exit 3", "ended with exit code 3"),
        ("exec false", "ended with exit code 1"),
        ("kill -9 $$", "was killed"),
        ("echo last words; exit", "last words\n"),
        ("set -e; false; echo no", "ended with exit code 1"),
        ("exec ls -d /tmp", "/tmp\n"),
        ("eval 'exec '{0..250}'>&-'; echo x", "the shell"),
    ],
)
async def test_a_command_that_ends_the_shell_is_told_and_the_next_call_has_a_new_one(shell, command, said):
    await shell.bash("x=gone")
    answer = await shell.bash(command)
    assert said in answer
    assert "the next call starts a new one" in answer
    assert await shell.bash('echo "<$x>" $PWD') == "<> /workspace"


async def test_options_traps_and_redirections_do_no_harm_to_later_calls(shell):
    async def ends(command, end):
        assert (await shell.bash(command)).endswith(end), command

    assert await shell.bash("set -e; true") == "(no output)"
    assert await shell.bash("false; echo on") == "on"
    assert await shell.bash("exec >file 2>&1; echo hidden") == "(no output)"
    assert await shell.bash("cat file") == "hidden"
    await shell.bash("exec 1>&- 2>&- 3>&- 9>&- 8>&-; echo x")
    assert await shell.bash("echo back") == "back"
    assert await shell.bash("trap 'echo bye' EXIT; trap 'echo err' ERR; false") == "err\n[exit code 1]"
    await shell.bash("trap - ERR; set -u; echo $undefined")
    await ends("set +u; set -x; echo t", "t")
    await ends("set +x; echo quiet", "quiet")
    assert await shell.bash("printf() { echo mine; }; alias kill=false; echo ok") == "ok"
    assert await shell.bash("IFS=x; echo still") == "still"


async def test_nothing_printed_is_taken_for_the_end(shell):
    command = (
        "for n in $(seq 300); do echo \"$RANDOM$RANDOM 0\"; printf '%016x 0\\n' $n; done; sleep 0.1; echo real end"
    )
    assert (await shell.bash(command)).endswith("real end")
    assert (await shell.bash("echo 0000 0 >&9; echo 1 >&8; echo ok")).endswith("ok")


async def test_long_output_is_cut_in_the_middle_and_says_how_much_is_left_out(shell):
    start = time.monotonic()
    said = await shell.bash("seq 1 1000000")
    assert time.monotonic() - start < 4
    assert said.startswith("1\n2\n3\n")
    assert said.endswith("999999\n1000000")
    assert "of 6888896 bytes left out" in said
    assert len(said.encode()) <= 4096


async def test_endless_output_is_stopped(shell):
    said = await shell.bash("yes")
    assert "[stopped: " in said
    assert await shell.bash("echo on") == "on"


async def test_binary_output_and_control_characters_are_harmless(shell):
    said = await shell.bash("head -c 100000 /dev/urandom; printf '\\033[31mred\\033[0m\\a\\b\\r\\n\\0end'")
    assert all(char in "\n\t" or char.isprintable() or ord(char) > 159 for char in said)
    assert said.endswith("red\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}\n\N{REPLACEMENT CHARACTER}end")
    assert len(said.encode()) <= 4096


async def test_restart_begins_anew_and_ends_what_ran(shell):
    await shell.bash("x=1; sleep 1304 &")
    assert await shell.bash(restart=True) == "The shell was restarted."
    assert found("sleep", "1304") == []
    assert await shell.bash('echo "<$x>"') == "<>"
    with pytest.raises(ToolError, match="no command"):
        await shell.bash("")
    with pytest.raises(ToolError, match="NUL"):
        await shell.bash("a\0b")


async def test_two_calls_at_once_run_one_after_the_other(shell):
    both = await asyncio.gather(shell.bash("x=1; sleep 0.2; echo $x"), shell.bash("x=2; echo $x"))
    assert both == ["1", "2"]


async def test_a_cancelled_call_leaves_nothing_running_and_the_next_has_a_new_shell(shell):
    call = asyncio.create_task(shell.bash("sleep 1305"))
    async with asyncio.timeout(5):
        while not found("sleep", "1305"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await shell.bash("echo new") == "new"
    assert found("sleep", "1305") == []


async def test_a_session_ends_with_its_episode(shell, sandbox):
    await shell.bash("x=1; sleep 1306 &")
    await asyncio.to_thread(sandbox.empty)
    assert found("sleep", "1306") == []
    shell.reset()
    assert await shell.bash('echo "<$x>"') == "<>"


async def test_a_large_command_arrives_whole(shell):
    text = "x" * 300_000
    assert await shell.bash(f"v='{text}'; echo ${{#v}}") == "300000"


async def test_an_image_with_nothing_but_a_plain_shell_has_a_kept_session_too(imaged):
    shutil.which("dash") or pytest.skip("needs dash")
    shell = await imaged(Hasty, "dash", "sleep", "cat", "ls")
    (await shell.sandbox.exec(["ls"])).exit_code == 127 and pytest.skip("programs of this machine do not run elsewhere")
    assert await imaged_shell_is_kept(shell)


async def imaged_shell_is_kept(shell):
    assert await shell.bash("ls /bin; x=kept; f() { echo f; }; cd /tmp") == "cat\ndash\nls\nsh\nsleep"
    assert await shell.bash("echo $x $PWD; f; false") == "kept /tmp\nf\n[exit code 1]"
    assert await shell.bash("echo $?") == "1"
    assert "yntax error" in await shell.bash("echo 'open")
    for command in ("sleep 1501; echo went on", "while :; do sleep 1501; done", "while :; do :; done"):
        said = await shell.bash(command)
        assert "stopped" in said
        assert "went on" not in said
        assert found("sleep", "1501") == []
        assert await shell.bash("echo $x") == "kept"
    await shell.bash("(while :; do echo noise; sleep 0.01; done) &")
    assert await shell.bash("sleep 0.05; echo clean") == "clean"
    assert "next call starts a new one" in await shell.bash("exit 4")
    return await shell.bash('echo "<$x>"') == "<>"


async def test_an_image_without_any_shell_says_so(imaged):
    shell = await imaged(Workshop, "sleep")
    with pytest.raises(ToolError, match="no shell in this sandbox"):
        await shell.bash("echo hi")
