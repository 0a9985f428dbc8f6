"""Environment code that is edited while a gateway runs: the next episode has it."""

import asyncio
import contextlib
import os
import signal
import sys

import pytest

from envfarm.core.errors import FarmError
from envfarm.core.ids import new_id
from envfarm.core.messages import AssistantMessage, ToolCall
from envfarm.wire.auth import read_token
from envfarm.wire.channel import connect
from envfarm.wire.episode_client import EpisodeClient

SECONDS = 60.0
CODE = '''
from envfarm import Environment, Task, tool

class Oracle(Environment):
    """Says one word."""

    def tasks(self, split):
        yield Task(id="t", prompt="ask")

    @tool
    def ask(self) -> str:
        """Ask."""
        return "WORD"
'''


@pytest.fixture
async def farm(tmp_path):
    file = tmp_path / "code" / "oracle.py"
    file.parent.mkdir()
    file.write_text(CODE.replace("WORD", "one"))
    name, address = f"{file}:Oracle", tmp_path / "address"
    argv = ["gateway", "--listen", "127.0.0.1:0", "--state", str(tmp_path / "s"), "--address-file", str(address)]
    argv += ["--environment", name, "--slots", "2", "--reload", "--drain-seconds", "1"]
    with (tmp_path / "log").open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "envfarm.cli.main", *argv, stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        async with asyncio.timeout(SECONDS):
            while not address.exists():
                assert process.returncode is None, (tmp_path / "log").read_text()
                await asyncio.sleep(0.05)
        channel = connect(address.read_text(), token=read_token(tmp_path / "s" / "token"))
        async with EpisodeClient(channel) as client:
            yield client, name, file
        await channel.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(SECONDS):
            await process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def said(client, name):
    (task,) = await client.tasks(name, "train", 0, 1)
    opened = await client.open(environment=name, task=task, seed=1, request_id=new_id("r"), timeout=SECONDS)
    call = AssistantMessage(content="", tool_calls=(ToolCall(id="c", name="ask", arguments="{}"),))
    answer = await client.step(opened.handle, 0, call, timeout=SECONDS)
    await client.close(opened.handle)
    return answer.messages[-1].content


async def until(client, name, wanted):
    seen = None
    async with asyncio.timeout(SECONDS):
        while wanted not in str(seen):
            try:
                seen = await said(client, name)
            except FarmError as error:  # in the moment of the change, or what the code is broken by
                seen = error
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_an_edited_tool_is_seen_by_the_next_episode_and_broken_code_says_why_until_it_is_mended(farm):
    client, name, file = farm
    assert await said(client, name) == "one"
    file.write_text(CODE.replace("WORD", "two"))
    await until(client, name, "two")
    file.write_text(CODE + "\ndef broken(:\n")
    await until(client, name, "invalid syntax")
    file.write_text(CODE.replace("WORD", "three"))
    await until(client, name, "three")
