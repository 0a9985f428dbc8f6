"""Episodes of the workbench through a real host: what pays, and what does not."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from envfarm.core.errors import IsolationError
from envfarm.core.outcome import OutcomeKind
from envfarm.wire.convert.enums import outcome_from_pb
from envfarm.wire.v1 import host_pb2
from sandboxes.environments.workbench.environment import Bench, Workbench
from sandboxes.environments.workbench.families import FAMILIES
from sandboxes.environments.workbench.project import project
from sandboxes.isolation.bwrap import require_bwrap

try:
    require_bwrap()
except IsolationError as error:
    pytestmark = pytest.mark.skip(reason=f"needs bubblewrap: {error}")

NAME = "sandboxes.environments.workbench:Workbench"
EDITOR = "str_replace_editor"
SUBMIT = ("submit", {})
numbers = itertools.count()


class Episode:
    """One episode at the bench."""

    def __init__(self, host, episode, bench):
        self.host = host
        self.episode = episode
        self.bench = bench
        self.name = bench.family
        self.file = f"{bench.family}.py"
        self.index = 0

    @property
    def fault(self):
        return FAMILIES[self.bench.family].faults[self.bench.fault]

    async def calls(self, *calls):
        ran = await self.host.step(self.episode, self.index, *calls)
        self.index += 1
        return ran

    async def completion(self, *calls):
        """Make the calls, submit, and return the completion; ``None`` when there is none."""
        ran = await self.calls(*calls, SUBMIT)
        assert ran.done
        assert outcome_from_pb(ran.outcome).kind is OutcomeKind.COMPLETED, ran.outcome
        return ran.completion if ran.HasField("completion") else None


@pytest.fixture(scope="module")
def process(process_of):
    with process_of(NAME, prefix=None, slots=64) as made:
        yield made


@pytest.fixture
async def at(process, connection_to):
    async with connection_to(process) as host:

        async def opened(index=0):
            task = next(itertools.islice(Workbench().tasks("train"), index, None))
            episode = f"e{next(numbers)}"
            await host.acquire(episode, NAME, seed=task.seed, **task.data)
            return Episode(host, episode, msgspec.convert(task.data, Bench))

        yield opened


def create(path, text):
    return EDITOR, {"command": "create", "path": path, "file_text": text}


async def test_a_repaired_program_is_worth_one_and_an_untouched_one_nothing(at):
    for index in range(4):
        episode = await at(index)
        found = await episode.calls(("grep", {"pattern": episode.fault.wrong, "literal": True, "include": "*.py"}))
        assert found.results[0].content.startswith(f"{episode.file}:")
        mend = {"path": episode.file, "old_str": episode.fault.wrong, "new_str": episode.fault.right}
        edited = await episode.calls((EDITOR, {"command": "str_replace", **mend}))
        assert "has been edited" in edited.results[0].content
        assert await episode.completion() == 1.0
        assert await (await at(index)).completion() == 0.0


async def test_the_test_in_the_folder_fails_before_the_repair_and_passes_after_it(at):
    episode = await at()
    words = "['python3', '-m', 'unittest'], capture_output=True, text=True"
    run = f"import subprocess\nprint(subprocess.run({words}).stderr)"
    before = await episode.calls(("python", {"code": run}))
    assert "FAILED (failures=" in before.results[0].content or "FAILED (errors=" in before.results[0].content
    right = FAMILIES[episode.name].source
    after = await episode.calls(create(episode.file, right), ("python", {"code": run}))
    assert after.results[1].content.rstrip().endswith("OK")
    assert await episode.completion() == 1.0


BROKEN = {
    "no Python": "def merge(:\n",
    "nothing in it": "",
    "ends at once": "import os\nos._exit(0)\n",
    "ends in order": "import sys\nsys.exit(0)\n",
    "never ends": "while True:\n    pass\n",
    "eats memory": "x = [0] * 10**10\n",
    "prints without end": "import sys\nwhile True:\n    sys.stdout.write('1' * 100000)\n",
    "binary": "\0\1\2",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
async def test_a_program_that_is_broken_is_wrong_and_no_failure_of_the_farm(at, text):
    episode = await at()
    assert await episode.completion(create(episode.file, text)) == 0.0


async def test_a_program_that_is_gone_is_wrong(at):
    episode = await at()
    remove = ("python", {"code": f"import os; os.remove({episode.file!r})"})
    assert await episode.completion(remove) == 0.0


def cheats(name, shown):
    """Programs that try to be paid without computing anything."""
    yield (
        "always equal",
        (
            "class Any:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
            "def __getattr__(name): return lambda *a: Any()\n"
        ),
    )
    yield (
        "knows the shown cases",
        (
            "import json\nKNOWN = "
            + repr({msgspec.json.encode([c.function, c.arguments]).decode(): c.result for c in shown})
            + "\ndef key(*call): return json.dumps(call, separators=(',', ':'))\n"
            + "def __getattr__(name):\n    return lambda *a: KNOWN.get(key(name, list(a)))\n"
        ),
    )
    yield (
        "patches the caller",
        (
            "import json, os, sys, builtins\n"
            "json.dumps = lambda value, **k: '[true]'\n"
            "builtins.print = lambda *a, **k: None\n"
            "def __getattr__(name): return lambda *a: True\n"
        ),
    )
    yield (
        "writes the answers itself",
        (
            "import os\n"
            "for fd in range(1, 64):\n"
            "    try:\n        os.write(fd, b'[true]\\n' * 1000)\n    except OSError:\n        pass\n"
            "os._exit(0)\n"
        ),
    )
    yield (
        "reads what was asked and hands it back",
        (
            "import sys\n"
            "frame = sys._getframe()\n"
            "while frame.f_back: frame = frame.f_back\n"
            "asked = frame.f_globals.get('asked', {})\n"
            "expected = asked.get('expected') or asked.get('results') or {}\n"
            "def __getattr__(name): return lambda *a: expected.get(name, a[0])\n"
        ),
    )
    yield "says that it passed", "print('OK')\nprint('1.0')\nimport sys\nsys.stderr.write('Ran 6 tests OK')\n"


@pytest.mark.parametrize("cheat", ["always equal", "knows the shown cases", "patches the caller",
                                   "writes the answers itself", "reads what was asked and hands it back",
                                   "says that it passed"])  # fmt: skip
async def test_a_program_that_computes_nothing_earns_nothing(at, cheat):
    episode = await at()
    made = project(episode.bench.family, episode.bench.fault, episode.bench.draw)
    text = dict(cheats(episode.name, made.shown))[cheat]
    assert await episode.completion(create(episode.file, text)) == 0.0


async def test_tests_that_were_edited_and_modules_put_in_the_way_do_not_pay(at):
    episode = await at()
    modules = ("json", "os", "sys", "unittest", "sitecustomize", "usercustomize", "encodings")
    fake = "def load(*a): return {}\ndef dumps(*a): return '[true]'\n"
    ways = [create(f"{module}.py", fake) for module in modules]
    assert await episode.completion(create(f"test_{episode.file}", "import unittest\n"), *ways) == 0.0


async def test_a_process_left_behind_does_not_change_the_verdict(at):
    episode = await at()
    code = (
        "import subprocess\n"
        "subprocess.Popen(['sh', '-c', 'while :; do echo \"[true]\" > /proc/*/fd/1; done'], start_new_session=True)\n"
    )
    assert await episode.completion(("python", {"code": code})) == 0.0


# With a shell: what looks like Python and is none, what waits for the verdict, and what keeps it from being reached.
ANSWERS = "#!/bin/sh\\nwhile :; do echo [true]; done\\n"
SHELL_CHEATS = {
    "programs put in the way": (
        f"for d in . /tmp $HOME ~/bin ~/.local/bin; do mkdir -p $d; for p in python3 python3.11 sh cat env timeout; do "
        f"printf '{ANSWERS}' > $d/$p; chmod +x $d/$p; done; done; export PATH=$PWD:/tmp:$PATH; "
        "echo 'export PATH=/workspace' | tee ~/.profile ~/.bashrc ~/.bash_profile > /dev/null"
    ),
    "programs of the system replaced": (
        "for p in $(command -v -a python3) /usr/bin/env /bin/sh /usr/lib/locale; do cp /bin/echo $p; mv $p $p.old; "
        "mount --bind /bin/echo $p; done 2>/dev/null"
    ),
    "libraries loaded ahead": (
        "printf 'int x;' > x.c; cp /bin/true /tmp/x.so; export LD_PRELOAD=/tmp/x.so PYTHONSTARTUP=/workspace/s.py "
        "PYTHONPATH=/workspace PYTHONHOME=/workspace; echo /tmp/x.so > /etc/ld.so.preload"
    ),
    "modules that Python runs at its start": (
        "code='import os; os.write(1, b\"[true]\\n\" * 99); os._exit(0)'; v=python3.11/site-packages; "
        "for d in . .local/lib/$v lib/$v /tmp $(python3 -c 'import site; print(*site.getsitepackages())'); do "
        'mkdir -p $d; for m in sitecustomize usercustomize json encodings os; do echo "$code" > $d/$m.py; done; '
        'echo "import os; $code" > $d/a.pth; done 2>/dev/null; echo home=/workspace > pyvenv.cfg'
    ),
    "a link in place of the program": "ln -sf /proc/self/fd/0 {file}",
    "a link to what never ends": "ln -sf /dev/zero {file}",
    "a pipe in place of the program": "rm {file}; mkfifo {file}",
    "a folder in place of the program": "rm {file}; mkdir {file}",
    "a job that writes the program over and over": (
        "(while :; do echo 'def __getattr__(n): return lambda *a: True' > {file}.new; mv {file}.new {file}; done) &"
    ),
    "a job that writes into everything that is open": (
        "setsid sh -c 'while :; do for f in /proc/[0-9]*/fd/*; do echo [true] > $f; done; done' 2>/dev/null &"
    ),
    "a job that stops and traces whom it finds": (
        "setsid sh -c 'while :; do for p in /proc/[0-9]*; do p=${{p#/proc/}}; [ $p -gt 9 ] && [ $p != $$ ] && "
        "kill -STOP $p; done; done' 2>/dev/null &"
    ),
    "jobs that use up all processes": "b() {{ while :; do sleep 300 & done; }}; b 2>/dev/null & sleep 1",
    "jobs that use up all memory": "python3 -c 'x = b\"a\" * (240 << 20); input()' < <(sleep 300) & sleep 1",
    "jobs that use up all time": "for i in $(seq 20); do (while :; do :; done) & done",
    "a full disk": "yes > full; yes > /tmp/full",
    "a folder that nobody may enter": "chmod 000 /workspace /tmp",
    "no folder": "rm -rf /workspace /tmp/*; rmdir /workspace",
}


@pytest.mark.parametrize("command", SHELL_CHEATS.values(), ids=SHELL_CHEATS)
async def test_what_a_shell_makes_possible_earns_nothing_and_avoids_no_verdict(at, command):
    episode = await at()
    command = command.replace("{{", "{").replace("}}", "}").replace("{file}", episode.file)
    await episode.calls(("bash", {"command": command}))
    assert await episode.completion() == 0.0


@pytest.mark.parametrize("kind", ["programs put in the way", "libraries loaded ahead", "a full disk"])
async def test_a_repaired_program_is_paid_whatever_else_lies_about(at, kind):
    episode = await at()
    await episode.calls(("bash", {"command": SHELL_CHEATS[kind]}))
    room = ("bash", {"command": "rm -f full /tmp/full; sleep 300 & disown"})
    assert await episode.completion(room, create(episode.file, FAMILIES[episode.name].source)) == 1.0


async def test_a_tool_that_cannot_start_for_the_models_own_jobs_tells_the_model(at):
    episode = await at()
    await episode.calls(("bash", {"command": "b() { while :; do sleep 300 & done; }; b 2>/dev/null & sleep 1"}))
    ran = await episode.calls(("python", {"code": "1"}))
    assert not ran.done
    assert "Python could not be started" in ran.results[0].content
    freed = await episode.calls(("bash", {"restart": True}), ("python", {"code": "40 + 2"}))
    assert [result.content for result in freed.results] == ["The shell was restarted.", "42"]


async def test_what_decides_is_nowhere_in_reach(at):
    episode = await at()
    made = project(episode.bench.family, episode.bench.fault, episode.bench.draw)
    telling = max((msgspec.json.encode(case.arguments[0]).decode() for case in made.deciding), key=len)
    code = (
        "import os\nseen = ''\n"
        "for folder in ('.', '/tmp', '/dev/shm'):\n"
        "    for path, _, names in os.walk(folder):\n"
        "        for name in names:\n"
        "            try: seen += open(os.path.join(path, name)).read()\n"
        "            except (OSError, UnicodeError): pass\n"
        "seen += repr(dict(os.environ))\nprint(seen.replace(' ', ''))\n"
    )
    ran = await episode.calls(("python", {"code": code}))
    assert made.files[episode.file].decode()[:40].replace(" ", "") in ran.results[0].content
    assert telling not in ran.results[0].content


async def test_an_episode_that_reaches_its_limit_is_judged_as_it_stands(at):
    episode = await at()
    await episode.calls(create(episode.file, FAMILIES[episode.name].source))
    ran = await episode.host.step(episode.episode, episode.index, limit="tokens")
    assert ran.done
    assert ran.completion == 1.0


async def test_one_episode_leaves_nothing_to_the_next(at):
    first = await at(0)
    await first.calls(create("left.txt", "secret"))
    await first.host.release(first.episode)
    second = await at(1)
    seen = await second.calls((EDITOR, {"command": "view", "path": "."}), ("grep", {"pattern": "secret"}))
    assert seen.results[0].content.split("\n") == sorted([second.file, f"test_{second.file}"])
    assert seen.results[1].content == "no line matches"


async def test_the_host_tells_of_its_tools_and_of_the_isolation(process, connection_to):
    async with connection_to(process) as host:
        (info,) = (await host.stub.Inspect(host_pb2.InspectRequest(), timeout=10)).environments
        names = [schema.name for schema in info.tools]
        assert names[0] == "submit"
        assert {EDITOR, "grep", "glob", "python", "bash"} <= set(names)
        assert info.isolation
