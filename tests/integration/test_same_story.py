"""With the same seed and a scripted policy, an episode is the same wherever it runs: behind real gateways."""

import asyncio
import contextlib
import itertools
from random import Random

import msgspec
import pytest

from envfarm.cli.local_farm import local_farm
from envfarm.core.ids import derived_seed, new_id
from envfarm.core.task import Task
from envfarm.rollout.evaluation import evaluate
from envfarm.rollout.ports import PolicySide
from envfarm.rollout.scripted import ScriptedEngine
from envfarm.rollout.tokens import PolicyTokenizer
from envfarm.rollout.tokens.template import TemplateBuilder
from envfarm.trajectories.digest import trajectory_digest
from envfarm.wire.episode_client import EpisodeClient
from envfarm.wire.log_client import LogClient
from sandboxes.environments.stockroom.demonstrations import Flaws, demonstrations
from sandboxes.environments.stockroom.questions import FAMILIES, TRAINING_ITEMS, draw_question
from trainer_bridge.warmup_tokenizer import train_tokenizer

EPISODES = 16
SEED = 11
FLAWS = Flaws(skip=0.3, slip=0.2, mistake=0.1)  # replies to calls that do not fit are part of the story too
TURN = "<|im_start|>assistant"


@pytest.fixture(scope="module")
def conversations():
    """Tasks with what is asked in them, each once, and what the clerk says to it, turn by turn."""
    found = {}
    clerk = demonstrations(SEED, FLAWS)
    for index in itertools.takewhile(lambda _: len(found) < EPISODES, itertools.count()):
        conversation = next(clerk)
        drawn = Random(derived_seed("stockroom", "demonstration", SEED, index)).getrandbits(48)
        question = draw_question(drawn, FAMILIES[index % len(FAMILIES)], TRAINING_ITEMS)
        task = Task(id=f"demonstration-{index}", data=msgspec.to_builtins(question))
        turns = [said(message) for message in conversation["messages"] if message["role"] == "assistant"]
        asked = conversation["messages"][1]["content"]
        found.setdefault(asked, (task, asked, turns))
    return [*found.values()]


def said(message):
    parts = [message["content"]] if message.get("content") else []
    calls = [call["function"] for call in message.get("tool_calls", ())]
    parts += [f'<tool_call>\n{{"name": "{c["name"]}", "arguments": {c["arguments"]}}}\n</tool_call>' for c in calls]
    return "\n".join(parts)


class TheseTasks:
    """A gateway's episodes, of tasks of our own."""

    def __init__(self, client, tasks):
        self._client = client
        self._tasks = tasks

    async def tasks(self, environment, split, offset, limit):
        return self._tasks[offset : offset + limit]

    def __getattr__(self, name):
        return getattr(self._client, name)


async def stories(state, conversations, **where):
    """Digests of all trajectories, by task; and how the episodes ended."""
    words = [text for _, prompt, turns in conversations for text in (prompt, *turns)]
    tokenizer = PolicyTokenizer(train_tokenizer(words, 400))

    def script(prompt):
        (turns,) = [turns for _, asked, turns in conversations if f"\n{asked}<|im_end|>" in prompt]
        return turns[min(prompt.count(TURN), len(turns)) - 1]

    async with contextlib.AsyncExitStack() as stack:
        farm = await stack.enter_async_context(
            local_farm(state, environments=["stockroom"], policy=None, slots=8, **where)
        )
        client = await stack.enter_async_context(EpisodeClient(farm.channel))
        log = await stack.enter_async_context(LogClient(farm.channel))
        side = PolicySide(
            episodes=TheseTasks(client, [task for task, _, _ in conversations]),
            engine=ScriptedEngine(tokenizer, script),
            tokens=TemplateBuilder(tokenizer),
            log=log,
            name="clerk",
        )
        async with asyncio.timeout(60):
            found = await evaluate(
                side, environment="stockroom", split="train", count=EPISODES, seed=SEED, run_id=new_id("story")
            )
        return {t.task_id: trajectory_digest(t) for t in found.trajectories}, found


async def test_an_episode_has_the_same_digest_when_it_is_run_again(conversations, tmp_path):
    first, found = await stories(tmp_path / "a", conversations)
    assert len(first) == len(set(first.values())) == EPISODES
    assert set(found.outcomes) == {"completed"}
    assert found.success is not None
    assert 0 < found.success < 1  # right and wrong ends are among them
    assert (await stories(tmp_path / "b", conversations))[0] == first


@pytest.mark.docker
@pytest.mark.xdist_group("docker")
async def test_an_episode_has_the_same_digest_in_a_container(conversations, tmp_path, host_image):
    options = (f"host_image={host_image}", "pull=never")
    in_container, found = await stories(tmp_path / "docker", conversations, backend="docker", backend_options=options)
    assert set(found.outcomes) == {"completed"}
    assert (await stories(tmp_path / "local", conversations))[0] == in_container
