"""A worker against a real gateway with a real host: groups come out whole, and every end is orderly."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import grpc.aio
import msgspec
import pytest
from aiohttp import web

from envfarm.core.engine import EngineStatus, GenerateRequest, Generation, SamplingParams, VersionSpan
from envfarm.core.errors import Unavailable
from envfarm.core.ids import new_id
from envfarm.core.log import Group
from envfarm.core.outcome import Outcome, OutcomeKind
from envfarm.core.run import Run, RunSettings, RunState
from envfarm.core.trajectory import Trajectory
from envfarm.rollout.evaluation import evaluate
from envfarm.rollout.ports import PolicySide
from envfarm.rollout.scripted import ScriptedEngine
from envfarm.rollout.tokens import PolicyTokenizer
from envfarm.rollout.tokens.template import TemplateBuilder
from envfarm.rollout.worker import Worker
from envfarm.trajectories.codec import decode
from envfarm.wire.channel import connect
from envfarm.wire.episode_client import EpisodeClient
from envfarm.wire.log_client import LogClient
from envfarm.wire.run_client import RunClient
from trainer_bridge.warmup_tokenizer import train_tokenizer

LOOK = '<tool_call>\n{"name": "quantity", "arguments": {"item": "red apples"}}\n</tool_call>'
ANSWER = '<tool_call>\n{"name": "answer", "arguments": {"value": 3}}\n</tool_call>'
START_SECONDS = 60
WAIT_SECONDS = 30


@pytest.fixture(scope="module")
def tokens() -> TemplateBuilder:
    words = "system user assistant quantity answer value item red apples How many are on the shelf? 0123456789"
    return TemplateBuilder(PolicyTokenizer(train_tokenizer([words] * 3, 320)))


class Farm:
    """A gateway process that serves ``stockroom``, and clients of it."""

    def __init__(self, state: Path, address: str, channel: grpc.aio.Channel) -> None:
        self.state = state
        self.address = address
        self.channel = channel
        self.runs = RunClient(channel)
        self.log = LogClient(channel)
        self.episodes = EpisodeClient(channel)

    async def run(self, **settings: object) -> Run:
        fields = {"environment": "stockroom", "group_size": 3, "groups_per_version": 2, "staleness": 0}
        return await self.runs.create("test", RunSettings(**(fields | settings)), new_id("test"))  # type: ignore[arg-type]

    async def groups(self, run: Run, count: int) -> list[Group]:
        found: list[Group] = []
        async with asyncio.timeout(WAIT_SECONDS), aclosing(self.log.subscribe(run.id, "test", after=0)) as stream:
            async for group in stream:
                found.append(group)
                if len(found) == count:
                    break
        return found


def wait_for(file: Path, process: subprocess.Popen[bytes]) -> str:
    """The address that the gateway writes once it serves."""
    give_up = time.monotonic() + START_SECONDS
    while not file.exists():
        assert process.poll() is None, "the gateway ended before it served"
        assert time.monotonic() < give_up, "the gateway does not serve"
        time.sleep(0.02)
    return file.read_text().strip()


def started(folder: Path) -> subprocess.Popen[bytes]:
    argv = ["gateway", "--state", str(folder / "state"), "--listen", "127.0.0.1:0", "--environment", "stockroom"]
    return subprocess.Popen(
        [sys.executable, "-m", "envfarm.cli.main", *argv, "--address-file", str(folder / "address")],
        stderr=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """State folder and address of a gateway process."""
    folder = tmp_path_factory.mktemp("farm")
    process = started(folder)
    try:
        yield folder / "state", wait_for(folder / "address", process)
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


@pytest.fixture
async def farm(gateway: tuple[Path, str]) -> AsyncIterator[Farm]:
    state, address = gateway
    channel = connect(address, token=(state / "token").read_text().strip())
    farm = Farm(state, address, channel)
    async with farm.log, farm.episodes:
        yield farm
    await channel.close()


class Silent:
    """An engine that answers nothing until it is told to abort, and then gives one token."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._ends: dict[str, asyncio.Event] = {}

    async def generate(self, request: GenerateRequest, *, timeout: float) -> Generation:
        end = self._ends[request.rid] = asyncio.Event()
        self.asked.set()
        await end.wait()
        return Generation(output_ids=[5], logprobs=[-1.0], finish="abort", versions=(VersionSpan(0, 0, 1),))

    async def abort(self, rid: str) -> None:
        self._ends[rid].set()

    async def update_weights_from_disk(self, path: str, *, version: int, timeout: float) -> None: ...

    async def status(self) -> list[EngineStatus]:
        return []

    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def scripted_server(tokens: TemplateBuilder) -> AsyncIterator[str]:
    """The scripted engine behind SGLang's ``/generate``; yields its URL."""
    script = ScriptedEngine(tokens._tokenizer, [LOOK, ANSWER], version=4)

    async def generate(request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        wanted = SamplingParams(
            max_new_tokens=body["sampling_params"]["max_new_tokens"],
            stop_token_ids=tuple(body["sampling_params"]["stop_token_ids"]),
        )
        ask = GenerateRequest(
            rid=body["rid"], input_ids=body["input_ids"], sampling=wanted, routing_key=body["routing_key"]
        )
        found = await script.generate(ask, timeout=1.0)
        scored = [[p, i, None] for p, i in zip(found.logprobs, found.output_ids, strict=True)]
        meta = {"finish_reason": {"type": found.finish}, "weight_version": "4", "output_token_logprobs": scored}
        return web.json_response({"output_ids": found.output_ids, "meta_info": meta})

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def policy_side(farm: Farm, tokens: TemplateBuilder, engine: object = None) -> PolicySide:
    script = ScriptedEngine(tokens._tokenizer, [LOOK, ANSWER])
    return PolicySide(episodes=farm.episodes, engine=engine or script, tokens=tokens, log=farm.log, name="scripted")  # type: ignore[arg-type]


def trajectories(groups: list[Group]) -> list[Trajectory]:
    return [decode(record.payload) for group in groups for record in group.records]


async def test_groups_come_out_whole_and_a_stopped_run_ends_its_worker(farm: Farm, tokens: TemplateBuilder) -> None:
    run = await farm.run()
    worker = Worker(policy_side(farm, tokens), farm.runs, run_id=run.id, name="w", concurrency=4)
    async with asyncio.timeout(2 * WAIT_SECONDS), asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.run())
        groups = await farm.groups(run, 2)
        await farm.runs.set_state(run.id, RunState.STOPPED, "seen enough")
    for group in groups:
        assert sorted(record.header.member for record in group.records) == [0, 1, 2]
        assert len({trajectory.task_id for trajectory in trajectories([group])}) == 1
    for trajectory in trajectories(groups):
        assert trajectory.outcome == Outcome.completed()
        assert [step.message.tool_calls[0].name for step in trajectory.steps] == ["quantity", "answer"]
        assert trajectory.steps[-1].parts["completion"] in (0.0, 1.0)
        assert trajectory.reward is not None
        assert (trajectory.policy, trajectory.oldest_version) == ("scripted", 0)
        (segment,) = trajectory.segments
        text = tokens._tokenizer.decode(segment.token_ids.tolist())
        assert trajectory.prompt[-1].content in text
        assert text.endswith(f"{ANSWER}<|im_end|>")
    async with aclosing(farm.runs.watch(run.id, history=True)) as watched:
        _, points = await anext(watched)
    last = {point.name: point.value for point in points}
    assert last["rollout/episodes"] == 6
    assert last["rollout/infra_failed"] == 0
    assert {"rollout/success", "rollout/steps_per_s", "rollout/tokens_per_s", "reward/format"} <= set(last)


async def test_draining_records_what_does_not_end_in_time_as_aborted(farm: Farm, tokens: TemplateBuilder) -> None:
    run, engine = await farm.run(groups_per_version=1), Silent()
    side = policy_side(farm, tokens, engine)
    worker = Worker(side, farm.runs, run_id=run.id, name="w", concurrency=2, grace_s=0.05)
    async with asyncio.timeout(WAIT_SECONDS), asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.run())
        await engine.asked.wait()
        assert worker.status().open >= 1
        assert "the engine" in str(worker.status())
        worker.drain()
    (group,) = await farm.groups(run, 1)
    assert len(group.records) == 3
    for record in group.records:
        assert record.header.outcome == Outcome.aborted("shutdown of the worker")
        assert record.header.final
        assert record.header.reward is None


async def test_an_evaluation_beside_a_run_is_logged_but_never_trained_on(farm: Farm, tokens: TemplateBuilder) -> None:
    run = await farm.run()
    evaluation = await evaluate(
        policy_side(farm, tokens), environment="stockroom", split="validation", count=8, run_id=run.id, concurrency=4
    )
    assert evaluation.outcomes == {"completed": 8}
    assert evaluation.judged == 8
    assert evaluation.steps == 16
    counts = await farm.log.counts(run.id)
    assert counts.records == 8
    assert {t.purpose for t in evaluation.trajectories} == {"evaluate"}


async def test_a_lost_host_fails_the_attempt_and_the_next_one_makes_the_group_whole(
    farm: Farm, tokens: TemplateBuilder
) -> None:
    run, engine = await farm.run(groups_per_version=1, group_size=1), Silent()
    script = ScriptedEngine(tokens._tokenizer, [LOOK, ANSWER])

    class LosesItsHost(ScriptedEngine):
        async def generate(self, request: GenerateRequest, *, timeout: float) -> Generation:
            if not engine.asked.is_set():
                engine.asked.set()
                for child in host_processes(farm.state):
                    os.kill(child, signal.SIGKILL)
            return await script.generate(request, timeout=timeout)

    side = policy_side(farm, tokens, LosesItsHost(tokens._tokenizer, ["unused"]))
    worker = Worker(side, farm.runs, run_id=run.id, name="w", concurrency=1)
    async with asyncio.timeout(2 * WAIT_SECONDS), asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.run())
        (group,) = await farm.groups(run, 1)
        await farm.runs.set_state(run.id, RunState.STOPPED, "seen enough")
    (record,) = group.records
    assert record.header.attempt == 1
    assert record.header.outcome.kind is OutcomeKind.COMPLETED
    counts = await farm.log.counts(run.id)
    assert (counts.records, counts.infra_failed) == (2, 1)


async def test_a_worker_process_ends_in_order_on_sigterm_with_every_group_whole(
    farm: Farm, tokens: TemplateBuilder, tmp_path: Path
) -> None:
    policy = tmp_path / "tiny"
    tokens._tokenizer.inner.save_pretrained(policy)
    run = await farm.run(groups_per_version=1000)
    async with scripted_server(tokens) as url:
        argv = ["worker", "--gateway", farm.address, "--token-file", str(farm.state / "token"), "--engine", url]
        argv += ["--run", run.id, "--tokenizer", str(policy), "--concurrency", "16", "--grace", "20"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "envfarm.cli.main", *argv, stderr=asyncio.subprocess.PIPE
        )
        groups = await farm.groups(run, 4)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_SECONDS):
            _, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()
    issued = (await farm.runs.get(run.id)).groups_issued
    counts = await farm.log.counts(run.id)
    assert issued >= 4
    assert (counts.groups, counts.records, counts.infra_failed) == (issued, 3 * issued, 0)
    for trajectory in trajectories(groups):
        assert trajectory.outcome == Outcome.completed()
        assert (trajectory.oldest_version, trajectory.policy) == (4, "tiny")


async def test_a_gateway_that_is_gone_does_not_keep_a_draining_worker(tokens: TemplateBuilder, tmp_path: Path) -> None:
    process = started(tmp_path)
    engine = Silent()
    try:
        address = await asyncio.to_thread(wait_for, tmp_path / "address", process)
        token = await asyncio.to_thread((tmp_path / "state" / "token").read_text)
        channel = connect(address, token=token.strip())
        farm = Farm(tmp_path / "state", address, channel)
        async with farm.log, farm.episodes, asyncio.timeout(WAIT_SECONDS):
            run = await farm.run()
            side = policy_side(farm, tokens, engine)
            worker = Worker(side, farm.runs, run_id=run.id, name="w", concurrency=8, grace_s=0.2)
            work = asyncio.ensure_future(worker.run())
            await engine.asked.wait()
            process.kill()
            worker.drain()
            with pytest.raises(ExceptionGroup) as caught:
                await work
        assert caught.group_contains(Unavailable)
        assert worker.status().log_trouble
        await channel.close()
    finally:
        process.kill()
        process.wait(WAIT_SECONDS)
        for child in host_processes(tmp_path):
            os.kill(child, signal.SIGTERM)


def host_processes(state: Path) -> list[int]:
    """Sandbox hosts of the farm in ``state``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if any(str(state) in word for word in words) and any("host" in word for word in words[:4]):
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--run", "run-nowhere"], "run-nowhere"),
        (["--run", "x", "--token-file", "/nowhere/token"], "/nowhere/token"),
        (["--run", "x", "--tokenizer", "/nowhere"], "tokenizer.json"),
    ],
)
async def test_the_command_says_what_is_wrong_in_one_sentence(
    farm: Farm, tokens: TemplateBuilder, tmp_path: Path, flags: list[str], words: str
) -> None:
    policy = tmp_path / "policy"
    tokens._tokenizer.inner.save_pretrained(policy)
    argv = ["worker", "--gateway", farm.address, "--engine", "http://127.0.0.1:9", "--tokenizer", str(policy)]
    if "--token-file" not in flags:
        argv += ["--token-file", str(farm.state / "token")]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "envfarm.cli.main", *argv, *flags, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(START_SECONDS):
        _, stderr = await process.communicate()
    text = stderr.decode()
    assert process.returncode == 1
    assert words in text
    assert "Traceback" not in text
