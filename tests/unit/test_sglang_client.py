"""The SGLang client against a scripted server on a real socket: reply shapes, retries, deadlines, typed errors."""

from __future__ import annotations

import asyncio
import socket

import pytest
import pytest_asyncio
from aiohttp import web

from envfarm.core.engine import GenerateRequest, SamplingParams, VersionSpan
from envfarm.core.errors import DeadlineExceeded, EngineError
from envfarm.inference.errors import EngineBusy, EngineRefused, EngineTimeout, EngineUnreachable
from envfarm.inference.sglang_client import SGLangClient


class Script:
    """Answers ``/generate`` and the rest from what a test puts here; notes every body it was sent."""

    def __init__(self):
        self.answers = []
        self.bodies = []
        self.cancelled = asyncio.Event()
        self.entered = asyncio.Event()

    async def handle(self, request):
        body = await request.json() if request.can_read_body else None
        self.bodies.append((request.path, body))
        answer = self.answers.pop(0) if self.answers else web.json_response({})
        self.entered.set()
        if answer == "hang":
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        if answer == "drop":
            request.transport.abort()
            await asyncio.sleep(0)
            return web.Response()
        return answer


@pytest_asyncio.fixture
async def script():
    made = Script()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.address = f"127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield made
    finally:
        await runner.cleanup()


@pytest_asyncio.fixture
async def client(script):
    async with SGLangClient(script.address) as made:
        yield made


def request(**sampling):
    return GenerateRequest(rid="r1", input_ids=[1, 2, 3], sampling=SamplingParams(**sampling), routing_key="episode")


def reply(ids, logprobs=None, finish=None, **meta):
    scored = [[p, t, None] for p, t in zip(logprobs or [-0.5] * len(ids), ids, strict=False)]
    info = {
        "id": "r1",
        "finish_reason": finish or {"type": "stop", "matched": 2},
        "prompt_tokens": 3,
        "cached_tokens": 1,
        "weight_version": "7",
        "output_token_logprobs": scored,
    }
    return web.json_response({"text": "", "output_ids": ids, "meta_info": info | meta})


def error(status, message):
    return web.json_response({"error": {"message": message}}, status=status)


async def test_a_request_is_sent_in_sglangs_words(script, client):
    script.answers = [reply([4, 2])]
    await client.generate(request(max_new_tokens=9, stop_token_ids=(2,), sampling_seed=5, temperature=0.5), timeout=5)
    ((path, body),) = script.bodies
    assert path == "/generate"
    assert body["rid"] == "r1"
    assert body["routing_key"] == "episode"
    assert body["input_ids"] == [1, 2, 3]
    assert body["return_logprob"] is True
    assert body["sampling_params"] == {
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "stop_token_ids": [2],
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "sampling_seed": 5,
    }


async def test_spans_of_weight_versions_become_integers(script, client):
    spans = [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 3}]
    script.answers = [reply([4, 5, 2], weight_versions=spans)]
    generation = await client.generate(request(), timeout=5)
    assert generation.versions == (VersionSpan(6, 0, 1), VersionSpan(7, 1, 3))
    assert generation.finish_detail == "2"
    assert (generation.prompt_tokens, generation.cached_tokens) == (3, 1)


async def test_without_spans_the_one_version_covers_the_answer(script, client):
    script.answers = [reply([4, 2], finish={"type": "length", "length": 2})]
    generation = await client.generate(request(), timeout=5)
    assert generation.versions == (VersionSpan(7, 0, 2),)
    assert generation.finish == "length"


async def test_an_abort_without_the_usual_fields_is_an_empty_answer(script, client):
    script.answers = [
        web.json_response(
            {"text": "", "meta_info": {"id": "r1", "finish_reason": {"type": "abort", "message": "gone"}}}
        )
    ]
    generation = await client.generate(request(), timeout=5)
    assert (generation.finish, generation.finish_detail) == ("abort", "gone")
    assert (generation.output_ids, generation.logprobs, generation.versions) == ([], [], ())


async def test_an_abort_keeps_the_partial_tokens(script, client):
    script.answers = [reply([4, 5], finish={"type": "abort", "message": "Abort request"})]
    generation = await client.generate(request(), timeout=5)
    assert (generation.finish, generation.output_ids) == ("abort", [4, 5])


@pytest.mark.parametrize(
    "answer",
    [
        reply([4, 5, 6], logprobs=[-1.0]),
        reply([4], weight_version="default"),
        reply([4], weight_version=None),
        reply([4], finish={"type": "surprise"}),
        web.json_response({"meta_info": {"output_token_logprobs": "x"}}),
        web.Response(text="<html>"),
    ],
)
async def test_an_answer_that_cannot_be_trained_on_is_an_error_never_a_guess(script, client, answer):
    script.answers = [answer]
    with pytest.raises(EngineError, match=script.address):
        await client.generate(request(), timeout=5)


async def test_a_refusal_is_not_repeated(script, client):
    script.answers = [error(400, "temperature must be positive")]
    with pytest.raises(EngineRefused, match="temperature must be positive"):
        await client.generate(request(), timeout=5)
    assert len(script.bodies) == 1


async def test_a_full_queue_is_tried_again_under_the_same_rid(script, client):
    script.answers = [error(503, "The request queue is full."), reply([4])]
    generation = await client.generate(request(), timeout=5)
    assert generation.output_ids == [4]
    assert [body["rid"] for _, body in script.bodies] == ["r1", "r1"]


async def test_a_queue_that_stays_full_is_told_at_the_deadline(script, client):
    script.answers = [error(503, "full") for _ in range(50)]
    with pytest.raises(EngineBusy, match="full"):
        await client.generate(request(), timeout=0.3)


async def test_a_connection_that_breaks_is_tried_once_more(script, client):
    script.answers = ["drop", reply([4])]
    assert (await client.generate(request(), timeout=5)).output_ids == [4]


async def test_a_lost_try_that_still_runs_is_waited_out(script, client):
    script.answers = ["drop", error(400, "Duplicate request ID detected: r1"), reply([4])]
    assert (await client.generate(request(), timeout=5)).output_ids == [4]


async def test_a_server_that_keeps_breaking_is_unreachable(script, client):
    script.answers = ["drop"] * 4
    with pytest.raises(EngineUnreachable):
        await client.generate(request(), timeout=5)
    assert len(script.bodies) <= 4


async def test_nobody_listening_is_unreachable():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    async with SGLangClient(address) as client:
        with pytest.raises(EngineUnreachable, match="is the engine running"):
            await client.generate(request(), timeout=5)
        assert not await client.healthy()
        assert not (await client.status()).healthy


async def test_a_deadline_is_typed_and_lets_go_of_the_server(script, client):
    script.answers = ["hang"]
    with pytest.raises(EngineTimeout) as caught:
        await client.generate(request(), timeout=0.2)
    assert isinstance(caught.value, DeadlineExceeded)
    async with asyncio.timeout(5):
        await script.cancelled.wait()


async def test_a_cancelled_caller_lets_go_of_the_server(script, client):
    script.answers = ["hang"]
    task = asyncio.create_task(client.generate(request(), timeout=30))
    async with asyncio.timeout(5):
        await script.entered.wait()
        task.cancel()
        await script.cancelled.wait()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_update_that_was_not_taken_is_an_error(script, client):
    script.answers = [web.json_response({"success": False, "message": "no such file"})]
    with pytest.raises(EngineRefused, match="no such file"):
        await client.update_weights_from_disk("/w", version=3, timeout=5)
    assert script.bodies[0][1]["weight_version"] == "3"


async def test_an_update_is_never_repeated_on_a_broken_connection(script, client):
    script.answers = ["drop"]
    with pytest.raises(EngineUnreachable):
        await client.update_weights_from_disk("/w", version=3, timeout=5)


async def test_flush_says_whether_the_cache_was_dropped(script, client):
    script.answers = [web.Response(status=400), web.Response(text="Cache flushed.")]
    assert not await client.flush_cache()
    assert await client.flush_cache()


async def test_status_reads_version_loads_and_the_token_counter(script, client):
    script.answers = [
        web.json_response({"model_path": "m", "weight_version": "4"}),
        web.json_response({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}, {"num_running_reqs": 3}]}),
        web.json_response({"context_length": None, "max_req_input_len": 90}),
        web.Response(text='# TYPE x counter\nsglang:generation_tokens_total{model_name="m"} 12.0\n'),
    ]
    status = await client.status()
    assert (status.version, status.running, status.waiting, status.tokens_generated) == (4, 5, 1, 12)
    assert status.context_tokens == 90
