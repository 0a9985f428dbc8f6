"""The Python that models use: a scope that is kept, short tracebacks, and an end to what has none."""

import asyncio
import time

import psutil
import pytest

from envfarm.core.environment import Environment
from envfarm.core.errors import IsolationError
from envfarm.core.sandbox import SandboxProfile
from envfarm.core.task import Limits
from sandboxes.isolation.bwrap import require_bwrap
from sandboxes.isolation.sandbox import slot_sandbox
from sandboxes.tools.python import Python

PROFILE = SandboxProfile(memory_bytes=256 * 2**20, disk_bytes=8 * 2**20, pids=48, exec_seconds=8.0)
try:
    require_bwrap()
except IsolationError as error:
    pytestmark = pytest.mark.skip(reason=f"needs bubblewrap: {error}")


class Notebook(Environment):
    """Has Python."""

    profile = PROFILE
    limits = Limits(result_bytes=4096)
    toolsets = (Python(seconds=4.0),)


class Hasty(Notebook):
    """Has Python with little time."""

    toolsets = (Python(seconds=0.7),)


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
    return environment.toolset(Python)


@pytest.fixture
def python(sandbox):
    return equipped(Notebook, sandbox).python


@pytest.fixture
def hasty(sandbox):
    return equipped(Hasty, sandbox).python


def found(*words):
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == list(words)]


async def test_names_are_kept_and_the_last_expression_is_shown(python):
    assert await python("import math\nx = 6\ndef f(a):\n    return a * x") == "(no output)"
    assert await python("print('hello')\nf(7)") == "hello\n42"
    assert await python("_ + 1") == "43"
    assert await python("None") == "(no output)"
    assert await python("'é漢'") == "'é漢'"
    assert await python("class A: pass\nimport pickle\ntype(pickle.loads(pickle.dumps(A()))).__name__") == "'A'"


async def test_modules_of_the_workspace_can_be_imported(python):
    assert await python("open('mine.py', 'w').write('y = 1')") == "5"
    assert await python("import mine\nmine.y") == "1"


async def test_tracebacks_are_short_and_show_only_the_codes_own_lines(python):
    await python("def f(n):\n    return 1 / n")
    said = await python("print('before')\nf(0)")
    assert said.startswith("before\nTraceback (most recent call last):\n")
    assert said.endswith("ZeroDivisionError: division by zero")
    assert "return 1 / n" in said
    assert "f(0)" in said
    assert "execute" not in said
    assert "<string>" not in said
    said = await python("x = (")
    assert "Traceback" not in said
    assert "SyntaxError: '(' was never closed" in said
    deep = await python("def g(n): return g(n + 1)\ng(0)")
    assert len(deep.splitlines()) < 16
    assert "RecursionError" in deep
    assert await python("f(1)") == "1.0"


async def test_there_is_no_input(python):
    assert "EOFError" in await python("input('name? ')")
    assert await python("import sys\nsys.stdin.read()") == "''"


async def test_what_takes_too_long_is_interrupted_and_names_are_kept(hasty):
    await hasty("x = 'kept'\nimport subprocess, threading, time")
    for code in (
        "while True: pass",
        "time.sleep(100)",
        "subprocess.run(['sleep', '1401'])",
        "subprocess.run('sleep 1401', shell=True)",
        "subprocess.Popen(['sleep', '1401'], start_new_session=True)\ntime.sleep(100)",
    ):
        start = time.monotonic()
        said = await hasty(code)
        assert "KeyboardInterrupt" in said, code
        assert said.endswith("error: stopped: time limit of 0.7 s")
        assert time.monotonic() - start < 4
        assert found("sleep", "1401") == [], code
        assert await hasty("x") == "'kept'", code


async def test_what_cannot_be_interrupted_is_ended_and_python_starts_anew(hasty):
    for code in (
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nimport time\ntime.sleep(100)",
        "sum(range(10 ** 12))",
    ):
        await hasty("x = 1")
        start = time.monotonic()
        said = await hasty(code)
        assert "starts it anew" in said, (code, said)
        assert time.monotonic() - start < 5
        assert "NameError" in await hasty("x")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os\nprint('last')\nos._exit(7)", "last\nerror: Python ended with exit code 7"),
        ("import os\nos._exit(127)", "error: Python ended with exit code 127"),
        ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
        ("import os\nos.kill(os.getpid(), 9)", "was killed"),
        ("import os\nos.closerange(3, 256)\nprint('closed')", "closed\nerror: Python"),
        ("import os\nos.execv('/bin/echo', ['echo', 'replaced'])", "replaced\nerror: Python ended with exit code 0"),
    ],
)
async def test_an_interpreter_that_ends_is_told_and_the_next_call_has_a_new_one(python, code, said):
    await python("x = 1")
    answer = await python(code)
    assert said in answer
    assert "starts it anew" in answer
    assert "NameError" in await python("x")


async def test_too_much_memory_is_an_error_or_a_new_start(python):
    said = await python("x = bytearray(2 * 2**30)")
    assert "MemoryError" in said or "starts it anew" in said
    assert await python("1 + 1") == "2"


async def test_leaving_ends_the_call_and_not_the_session(python):
    assert await python("x = 1\nimport sys\nsys.exit()") == "(no output)"
    assert await python("sys.exit('why')") == "SystemExit: why"
    assert await python("x") == "1"


async def test_prints_of_threads_and_children_are_shown(python):
    code = (
        "import os, threading\nt = threading.Thread(target=lambda: print('thread')); t.start(); t.join()\n"
        "os.system('echo child')"
    )
    assert await python(code) == "thread\nchild\n0"
    await python("e = threading.Event()\nthreading.Thread(target=lambda: (e.wait(), print('late'))).start()")
    assert await python("e.set()\nimport time; time.sleep(0.1)\nprint('end')") == "late\nend"


async def test_a_fork_that_goes_on_to_its_end_does_not_answer(python):
    code = "import os\nx = 1\npid = os.fork()\nprint('both')\n_ = os.waitpid(pid, 0) if pid else 0"
    assert await python(code) == "both\nboth"
    assert await python("x") == "1"


async def test_streams_that_were_closed_or_replaced_are_back_in_the_next_call(python):
    await python("import os, sys\nos.close(1); os.close(2); os.close(0)")
    assert await python("print('back')") == "back"
    await python("sys.stdout.close(); sys.stderr = None")
    assert await python("print('again')") == "again"
    assert "ValueError" in await python("raise ValueError")


async def test_nothing_printed_is_taken_for_the_answer(python):
    code = (
        "import os\nfor fd in range(3, 256):\n    try: os.write(fd, b'0123456789abcdef 0\\n')\n"
        "    except OSError: pass\nfor i in range(1000): print('%016x 0' % i)\nprint('end')"
    )
    assert (await python(code)).endswith("end")
    assert await python("2 + 2") == "4"


async def test_long_output_is_cut_in_the_middle(python):
    said = await python("for i in range(200000): print(i)\n'x' * 10")
    assert said.startswith("0\n1\n2\n")
    assert said.endswith("199999\n'xxxxxxxxxx'")
    assert "bytes left out" in said
    assert len(said.encode()) <= 4096
    assert len(await python("'y' * 10**7")) <= 4096


async def test_a_session_ends_with_its_episode(sandbox):
    toolset = equipped(Notebook, sandbox)
    await toolset.python("x = 1")
    await asyncio.to_thread(sandbox.empty)
    toolset.reset()
    assert "NameError" in await toolset.python("x")


async def test_calls_at_once_run_one_after_the_other_and_a_cancelled_one_leaves_nothing(python):
    assert await asyncio.gather(python("import time\nx = 1\ntime.sleep(0.1)\nx"), python("x = 2\nx")) == ["1", "2"]
    call = asyncio.create_task(python("import subprocess\nsubprocess.run(['sleep', '1402'])"))
    async with asyncio.timeout(5):
        while not found("sleep", "1402"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert "NameError" in await python("x")
    assert found("sleep", "1402") == []


async def test_large_code_arrives_whole(python):
    assert await python(f"len('{'x' * 300_000}')") == "300000"
