"""The embedded engine over HTTP, through the farm's own SGLang client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager

import aiohttp
import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")
from aiohttp import web  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from envfarm.core.engine import GenerateRequest, SamplingParams, VersionSpan  # noqa: E402
from envfarm.inference.embedded.serve import EngineSettings, load  # noqa: E402
from envfarm.inference.embedded.server import build  # noqa: E402
from envfarm.inference.errors import EngineBusy, EngineRefused, EngineTimeout, EngineUnreachable  # noqa: E402
from envfarm.inference.pool import EnginePool  # noqa: E402
from envfarm.inference.sglang_client import SGLangClient  # noqa: E402

VOCAB = 64


def write_model(folder, seed):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        initializer_range=0.3,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [write_model(tmp_path_factory.mktemp(f"weights-{seed}"), seed) for seed in (0, 1)]


@asynccontextmanager
async def serving(folder, *, max_queued=100, **settings):
    scheduler = load(EngineSettings(model=folder, context=4096, **settings))
    engine, app = build(scheduler, model_path=str(folder), seed=0, max_queued=max_queued)
    engine.start()
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}", engine
    finally:
        await engine.stop()
        await runner.cleanup()


@pytest_asyncio.fixture
async def engine(folders):
    async with serving(folders[0], max_rows=8) as (address, thread), SGLangClient(address) as client:
        client.thread = thread
        yield client


def ask(ids=(1, 2, 3), rid="r", key="", **sampling):
    return GenerateRequest(rid=rid, input_ids=list(ids), sampling=SamplingParams(**sampling), routing_key=key)


LONG = {"max_new_tokens": 3000}


async def until(condition, seconds=20):
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the conditions are of another thread or process
            await asyncio.sleep(0.002)


async def running(client, rid="long", **sampling):
    """A task of a long request that has begun to sample."""
    before = client.thread.scheduler.counters.generation_tokens
    task = asyncio.create_task(client.generate(ask(rid=rid, **(LONG | sampling)), timeout=60))
    await until(lambda: client.thread.scheduler.counters.generation_tokens > before + 3)
    return task


async def post(client, path, body):
    async with aiohttp.ClientSession() as session, session.post(client.url + path, json=body) as response:
        return response.status, await response.text()


async def test_a_generation_has_tokens_scores_and_versions(engine):
    generation = await engine.generate(ask(max_new_tokens=7), timeout=30)
    assert len(generation.output_ids) == len(generation.logprobs) == 7
    assert all(p <= 0 for p in generation.logprobs)
    assert generation.finish == "length"
    assert generation.versions == (VersionSpan(0, 0, 7),)
    assert generation.prompt_tokens == 3


async def test_scores_are_those_of_a_plain_forward_pass(engine, folders):
    generation = await engine.generate(ask(range(20), max_new_tokens=30, temperature=0.8), timeout=30)
    model = Qwen3ForCausalLM.from_pretrained(folders[0])
    with torch.inference_mode():
        logits = model(torch.tensor([[*range(20), *generation.output_ids]])).logits[0, 19:-1]
    expected = torch.log_softmax(logits / 0.8, -1).gather(-1, torch.tensor(generation.output_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)


async def test_the_next_turn_reuses_the_rows_of_its_episode(engine):
    first = await engine.generate(ask(range(40), key="e", max_new_tokens=5), timeout=30)
    turn = [*range(40), *first.output_ids, 7, 8]
    second = await engine.generate(ask(turn, rid="2", key="e", max_new_tokens=5), timeout=30)
    assert second.cached_tokens == 44


async def test_many_requests_at_once_are_all_answered(engine):
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(engine.generate(ask([i % 60, 1], rid=str(i), max_new_tokens=10), timeout=60))
            for i in range(64)
        ]
    assert all(len(task.result().output_ids) == 10 for task in tasks)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": [1, VOCAB]}, "out of the model's vocabulary"),
        ({"input_ids": [-1]}, "out of the model's vocabulary"),
        ({"input_ids": [1 << 80]}, "input_ids"),
        ({"input_ids": []}, "missing or empty"),
        ({"text": "hello"}, "takes token ids"),
        ({"input_ids": [1], "sampling_params": {"temprature": 1}}, "temprature"),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": [1], "sampling_params": {"top_k": 0}}, "top_k"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 4096}}, "maximum context length"),
        ({"input_ids": [1], "sampling_params": {"stop": "x"}}, "use SGLang"),
        ({"input_ids": [1], "sampling_params": {"regex": "a+"}}, "use SGLang"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": list(range(40))}}, "stop token ids"),
        ({"input_ids": [1], "stream": True}, "use SGLang"),
        ({"input_ids": "abc"}, "input_ids"),
    ],
)
async def test_bad_input_is_answered_400_with_what_is_wrong(engine, body, message):
    status, text = await post(engine, "/generate", body)
    assert status == 400
    assert message in json.loads(text)["error"]["message"]


async def test_a_refusal_reaches_the_caller_with_its_reason(engine):
    with pytest.raises(EngineRefused, match="vocabulary"):
        await engine.generate(ask([999]), timeout=5)


async def test_unknown_top_level_fields_are_ignored(engine):
    status, _ = await post(engine, "/generate", {"input_ids": [1], "priority": 3, "sampling_params": {}})
    assert status == 200


async def test_an_abort_returns_the_tokens_so_far(engine):
    task = await running(engine)
    await engine.abort("long")
    generation = await task
    assert generation.finish == "abort"
    assert 3 < len(generation.output_ids) == len(generation.logprobs) < 3000


async def test_an_aborted_request_that_never_ran_comes_back_empty(engine):
    await engine.pause("retract")
    task = asyncio.create_task(engine.generate(ask(rid="w"), timeout=30))
    await until(lambda: engine.thread.live == 1)
    await engine.abort("w")
    generation = await task
    assert (generation.finish, generation.output_ids, generation.versions) == ("abort", [], ())
    await engine.resume()


async def test_a_client_that_goes_away_frees_its_row(engine):
    task = await running(engine)
    task.cancel()
    await until(lambda: engine.thread.live == 0 and engine.thread.scheduler.rows.active == 0)
    assert engine.thread.scheduler.counters.aborted == 1


async def test_a_timeout_is_typed_and_frees_the_row(engine):
    with pytest.raises(EngineTimeout):
        await engine.generate(ask(**LONG), timeout=0.2)
    await until(lambda: engine.thread.scheduler.rows.active == 0)


async def test_new_weights_take_effect_within_a_running_answer(engine, folders):
    task = await running(engine)
    await engine.update_weights_from_disk(str(folders[1]), version=5, timeout=30)
    assert await engine.version() == 5
    await engine.abort("long")
    generation = await task
    assert [span.version for span in generation.versions] == [0, 5] or generation.versions[-1].version == 0
    assert generation.versions[-1].end == len(generation.output_ids)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_pause_swap_continue_splits_the_spans_at_the_token(engine, folders, mode):
    task = await running(engine, max_new_tokens=600)
    await engine.pause(mode)
    produced = engine.thread.scheduler.counters.generation_tokens
    await engine.update_weights_from_disk(str(folders[1]), version=1, timeout=30)
    await engine.resume()
    generation = await task
    assert generation.versions == (VersionSpan(0, 0, produced), VersionSpan(1, produced, 600))


async def test_pause_with_abort_ends_what_runs(engine):
    task = await running(engine)
    await engine.pause("abort")
    assert (await task).finish == "abort"
    await engine.resume()


async def test_weights_that_cannot_be_read_are_refused_and_the_old_version_stays(engine, tmp_path):
    with pytest.raises(EngineRefused, match=r"safetensors"):
        await engine.update_weights_from_disk(str(tmp_path), version=9, timeout=30)
    assert await engine.version() == 0


async def test_the_cache_is_flushed_only_when_nothing_runs(engine):
    await engine.generate(ask(range(20), key="e", max_new_tokens=2), timeout=30)
    task = await running(engine)
    assert not await engine.flush_cache()
    await engine.abort_all()
    await task
    assert await engine.flush_cache()
    again = await engine.generate(ask(range(20), rid="2", key="e", max_new_tokens=2), timeout=30)
    assert again.cached_tokens == 0


async def test_a_full_queue_answers_busy(folders):
    async with serving(folders[0], max_rows=1, max_queued=1) as (address, thread), SGLangClient(address) as client:
        client.thread = thread
        first = await running(client)
        second = asyncio.create_task(client.generate(ask(rid="second"), timeout=30))
        await until(lambda: thread.live == 2)
        with pytest.raises(EngineBusy, match="queue is full"):
            await client.generate(ask(rid="third"), timeout=0.3)
        await client.abort_all()
        assert {(await first).finish, (await second).finish} == {"abort"}


async def test_a_rid_that_is_live_is_not_run_twice(engine):
    task = await running(engine)
    status, text = await post(engine, "/generate", {"rid": "long", "input_ids": [1]})
    assert status == 400
    assert "Duplicate" in text
    await engine.abort("long")
    await task


async def test_state_and_metrics_tell_what_runs(engine):
    await engine.generate(ask(max_new_tokens=4), timeout=30)
    task = await running(engine)
    status = await engine.status()
    assert status.healthy
    assert (status.running, status.waiting, status.version) == (1, 0, 0)
    assert status.tokens_generated > 4
    info = await engine.server_info()
    assert (info["max_running_requests"], info["context_length"]) == (8, 4096)
    await engine.abort_all()
    await task


async def test_requests_without_a_seed_differ_from_each_other(engine):
    first = await engine.generate(ask(rid="a", max_new_tokens=30), timeout=30)
    second = await engine.generate(ask(rid="b", max_new_tokens=30), timeout=30)
    assert first.output_ids != second.output_ids


async def test_a_pool_updates_every_engine(folders):
    async with (
        serving(folders[0], max_rows=2) as (one, _),
        serving(folders[0], max_rows=2) as (two, _),
        EnginePool([one, two]) as pool,
    ):
        await pool.update_weights_from_disk(str(folders[1]), version=3, timeout=30)
        assert [s.version for s in await pool.status()] == [3, 3]
        generation = await pool.generate(ask(), timeout=30)
        assert generation.versions[-1].version == 3


async def test_requests_of_an_engine_that_ends_go_on_elsewhere_with_the_same_tokens(folders):
    def request(i):
        return ask([i, 1], rid=f"{i}", key=f"e{i}", max_new_tokens=400, sampling_seed=i)

    async with serving(folders[0], max_rows=8) as (stays, other):
        async with serving(folders[0], max_rows=8) as (ends, thread), EnginePool([stays, ends]) as pool:
            tasks = [asyncio.create_task(pool.generate(request(i), timeout=60)) for i in range(8)]
            await until(lambda: thread.scheduler.counters.generation_tokens > 20)
            await thread.stop()
            moved = [(await task).output_ids for task in tasks]
        async with SGLangClient(stays) as client:
            expected = [(await client.generate(request(i), timeout=60)).output_ids for i in range(8)]
    assert moved == expected
    assert other.scheduler.counters.requests == 16


async def test_the_engine_process_serves_and_ends_cleanly_on_sigterm(folders, tmp_path):
    address_file = tmp_path / "address"
    command = "import typer; from envfarm.inference.command import engine; typer.run(engine)"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", command, "--model", str(folders[0])),
        *("--address-file", str(address_file), "--weight-version", "4", "--context", "4096"),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await until(lambda: address_file.exists() or process.returncode is not None, seconds=90)
        async with SGLangClient(address_file.read_text()) as client:
            generation = await client.generate(ask(max_new_tokens=3), timeout=30)
            assert generation.versions == (VersionSpan(4, 0, 3),)
            task = asyncio.create_task(client.generate(ask(rid="cut", **LONG), timeout=30))
            await asyncio.wait([task], timeout=0.05)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(5):
                _, errors = await process.communicate()
            assert process.returncode == 0
            with pytest.raises(EngineUnreachable):
                await task
        assert b"Traceback" not in errors
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
