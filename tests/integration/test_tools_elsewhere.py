"""The ready-made tools where a host is not root: as another user of this machine, and in a container."""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from envfarm.core.errors import IsolationError
from envfarm.core.ids import new_id
from envfarm.core.messages import AssistantMessage, ToolCall
from envfarm.wire.episode_client import EpisodeClient
from sandboxes.isolation.bwrap import require_bwrap

SECONDS = 60.0
ROOT = Path(__file__).parents[2]
PLAIN_PYTHON = "/usr/bin/python3"
# The folder in which the host tells its address has to be its own.
BECOME = """#!/bin/sh
for word; do
  [ "$last" = --address-file ] && chown 65532 "${{word%/*}}"
  last=$word
done
export PYTHONPATH={places} HOME=/tmp
exec setpriv --reuid 65532 --regid 65532 --clear-groups {python} "$@"
"""
BENCH = '''
from envfarm import Environment, Limits, SandboxProfile, Task
from sandboxes.tools import Files, Python, Shell, Sql

class Bench(Environment):
    """Has all tools that run something."""

    limits = Limits(steps=100)
    profile = SandboxProfile(memory_bytes=128 * 2**20, disk_bytes=8 * 2**20, pids=64)
    toolsets = (Shell(seconds=2.0), Python(seconds=2.0), Files(), Sql("CREATE TABLE t (a)"))

    def tasks(self, split):
        yield Task(id="t", prompt="work")
'''
numbers = itertools.count()


@pytest.fixture
def bench():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # where every user may go
        Path(folder).chmod(0o755)
        file = Path(folder, "bench.py")
        file.write_text(BENCH)
        yield f"{file}:Bench"


@contextlib.asynccontextmanager
async def as_another_user(bench, request):
    """Episodes at a host without privileges."""
    try:
        require_bwrap()
    except IsolationError as error:
        pytest.skip(f"needs bubblewrap: {error}")
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, to be somebody else, and setpriv")
    same = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    if subprocess.run([PLAIN_PYTHON, "-c", same], check=False).returncode:  # noqa: ASYNC221
        pytest.skip("needs a Python of this version that every user can reach")
    wrapper = request.getfixturevalue("tmp_path") / "python"
    places = ":".join([str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))])
    wrapper.write_text(BECOME.format(places=places, python=PLAIN_PYTHON))
    wrapper.chmod(0o755)
    process_of, connection_to = (request.getfixturevalue(name) for name in ("process_of", "connection_to"))
    request.getfixturevalue("monkeypatch").setattr(sys, "executable", str(wrapper))
    with process_of(bench, prefix=None, slots=2) as process:
        assert psutil.Process(process.process.pid).uids().effective == 65532
        async with connection_to(process) as host:

            @contextlib.asynccontextmanager
            async def episode():
                name, steps = f"e{next(numbers)}", itertools.count()
                await host.acquire(name, bench)

                async def call(tool, **arguments):
                    ran = await host.step(name, next(steps), (tool, arguments))
                    assert not ran.done, ran.outcome
                    return ran.results[0].content

                try:
                    yield call
                finally:
                    await host.release(name)

            yield episode


@contextlib.asynccontextmanager
async def in_a_container(bench, request):
    """Episodes at a gateway whose hosts are containers."""
    pytest.importorskip("docker")
    from envfarm.cli.local_farm import local_farm

    options = (f"host_image={request.getfixturevalue('host_image')}", "pull=never")
    state = request.getfixturevalue("tmp_path") / "state"
    farm_of = local_farm(
        state, environments=[bench], policy=None, slots=2, backend="docker", backend_options=options
    )  # fmt: skip
    async with farm_of as farm, EpisodeClient(farm.channel) as client:

        @contextlib.asynccontextmanager
        async def episode():
            (task,) = await client.tasks(bench, "train", 0, 1)
            opened = await client.open(environment=bench, task=task, seed=1, request_id=new_id("r"), timeout=SECONDS)
            steps = itertools.count()

            async def call(tool, **arguments):
                calls = (ToolCall(id="c", name=tool, arguments=json.dumps(arguments)),)
                message = AssistantMessage(content="", tool_calls=calls)
                answer = await client.step(opened.handle, next(steps), message, timeout=SECONDS)
                assert answer.outcome is None, answer.outcome
                return answer.messages[-1].content

            try:
                yield call
            finally:
                await client.close(opened.handle)

        yield episode


@pytest.fixture(
    params=[
        as_another_user,
        pytest.param(in_a_container, marks=[pytest.mark.docker, pytest.mark.xdist_group("docker")]),
    ],
    ids=lambda param: param.__name__,
)
def place(request, bench):
    return request.param(bench, request)


def sleeping(seconds):
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or [])[-2:] == ["sleep", seconds]
    ]


async def gone(seconds):
    async with asyncio.timeout(20):
        while sleeping(seconds):  # noqa: ASYNC110 - others end them
            await asyncio.sleep(0.02)


async def test_tools_hold_what_they_promise_where_the_host_is_not_root(place):
    mark = f"{1_000_000 + os.getpid()}"
    async with place as episode:
        async with episode() as call:
            # A time limit stops a command, and neither the shell nor an earlier job.
            assert await call("bash", command=f"x=kept; cd /tmp; sleep {mark} & echo up") == "up"
            said = await call("bash", command="setsid sleep 1700 & sleep 1700; echo went on")
            assert "what the command started was killed" in said
            assert "went on" not in said
            assert sleeping("1700") == []
            assert len(sleeping(mark)) == 1
            assert await call("bash", command="echo $x $PWD; jobs -r | wc -l") == "kept /tmp\n1"
            # So it is in Python.
            assert await call("python", code="y = 41") == "(no output)"
            assert "time limit" in await call("python", code="while True: pass")
            assert await call("python", code="y + 1") == "42"
            # Files and the database are the same for all of them.
            await call("str_replace_editor", command="create", path="note.txt", file_text="one\ntwo\n")
            assert (
                await call("bash", command="cat /workspace/note.txt; echo three >> /workspace/note.txt") == "one\ntwo"
            )
            assert await call("grep", pattern="three", include="*.txt") == "note.txt:3:three"
            assert await call("python", code="len(open('note.txt').read())") == "14"
            await call("execute_sql", query="BEGIN; INSERT INTO t VALUES (7)")
            assert await call("execute_sql", query="COMMIT") == "OK"
            counting = "import sqlite3; sqlite3.connect('database.sqlite').execute('SELECT a FROM t').fetchall()"
            assert await call("python", code=counting) == "[(7,)]"
            # Memory is bounded for all that one command runs, and the tools go on.
            eating = "import os\nfor _ in range(3): os.fork()\nx = bytearray(60 << 20)\nimport time; time.sleep(300)\n"
            await call("str_replace_editor", command="create", path="eats.py", file_text=eating)
            said = await call("bash", command="cd /workspace; python3 eats.py; echo status $?")
            assert "stopped: time limit" not in said
            assert "status 137" in said or "was killed" in said
            assert await call("python", code="6 * 7") == "42"
            await call("bash", command=f"setsid sleep {mark} & true")
        # Nothing is left: no process, no file.
        await gone(mark)
        async with episode() as call:
            assert await call("bash", command="ls -A /workspace /tmp; echo ${x-unset}") == (
                "/tmp:\n\n/workspace:\ndatabase.sqlite\nunset"
            )
            assert "NameError" in await call("python", code="y")
            assert await call("execute_sql", query="SELECT count(*) AS n FROM t") == "n\n---\n0\n(1 row)"
