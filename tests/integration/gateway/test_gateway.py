"""What a gateway promises, over real processes: episodes, exactly-once steps, rewards, refusals."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from envfarm.core.episode import TextAction
from envfarm.core.errors import ConfigError, EnvironmentCodeError, Rejected, StepConflict, Unavailable
from envfarm.core.messages import Diagnosis, ToolStatus
from envfarm.core.outcome import Outcome
from envfarm.core.rewards import RewardSettings
from envfarm.wire.channel import connect
from envfarm.wire.episode_client import EpisodeClient
from envfarm.wire.status import from_status
from envfarm.wire.v1 import episode_pb2, episode_pb2_grpc, types_pb2

CALL = '<tool_call>\n{"name": "sell", "arguments": {"pieces": 2}}\n</tool_call>'


async def test_an_environment_is_described_with_its_tools_and_tasks(client, shop):
    (info,) = await client.describe()
    assert info.name == shop.environment
    assert [tool.name for tool in info.tools] == ["sell", "wait_for", "refuse", "finish"]
    assert [t.id for t in await client.tasks(info.name, "train", 3, 10)] == ["train-3", "train-4"]


async def test_an_unknown_environment_is_named_with_what_there_is(client, shop):
    with pytest.raises(ConfigError, match=r"no environment 'shopp' here.*shop\.py:Shop"):
        await client.describe("shopp")
    with pytest.raises(ConfigError, match="no split 'trian'"):
        await client.tasks(shop.environment, "trian", 0, 1)
    with pytest.raises(ConfigError, match="limit is 5000"):
        await client.tasks(shop.environment, "train", 0, 5000)


@pytest.mark.parametrize(
    ("index", "text"), [(-1, CALL), (1 << 63, CALL), (0, "half a pair: \ud800")], ids=["negative", "huge", "surrogate"]
)
async def test_what_no_message_can_carry_is_told_and_harms_nothing(client, shop, index, text):
    opened = await shop.open(client)
    with pytest.raises(ConfigError, match="cannot be sent"):
        await client.step(opened.handle, index, TextAction(format="hermes", text=text), timeout=20)
    answer = await client.step(opened.handle, 0, TextAction(format="hermes", text=CALL), timeout=20)
    assert answer.diagnosis is Diagnosis.OK
    await client.close(opened.handle)


async def test_an_episode_runs_to_its_end_with_reward_parts_per_step(client, shop):
    opened = await shop.open(client)
    assert [m.role for m in opened.messages] == ["system", "user"]
    assert opened.environment == f"{shop.environment}@1"
    first = await client.step(opened.handle, 0, shop.says(("sell", {"pieces": 3})), sampled_tokens=9, timeout=20)
    assert first.messages[0].content == "sold 3, call 1"
    assert not first.done
    assert first.parts["progress"] == pytest.approx(0.1)
    assert first.parts["completion"] is None
    assert first.reward == pytest.approx(0.5 * 0.1 + 2.0 * 1.0)  # the signal `sold` is capped at 1
    last = await client.step(opened.handle, 1, shop.says(("finish", {"right": True})), timeout=20)
    assert last.done
    assert last.outcome == Outcome.completed()
    assert last.parts["completion"] == 1.0
    await client.close(opened.handle)
    await client.close(opened.handle)


async def test_a_run_can_weigh_the_parts_in_its_own_way(client, shop):
    opened = await shop.open(client, reward=RewardSettings(weights={"tool": 3.0}))
    answer = await client.step(opened.handle, 0, shop.says(("sell", {"pieces": 3})), timeout=20)
    assert answer.reward == pytest.approx(3.0)
    await client.close(opened.handle)


async def test_text_is_parsed_by_the_format_it_names(client, shop):
    opened = await shop.open(client)
    answer = await client.step(opened.handle, 0, TextAction(format="hermes", text=CALL), timeout=20)
    assert answer.diagnosis is Diagnosis.OK
    assert answer.results[0].content == "sold 2, call 1"
    assert answer.message.tool_calls[0].name == "sell"
    with pytest.raises(ConfigError, match="no tool-call format named 'hermse'"):
        await client.step(opened.handle, 1, TextAction(format="hermse", text=CALL), timeout=20)
    await client.close(opened.handle)


@pytest.mark.parametrize(
    ("text", "diagnosis"),
    [
        (CALL[:-20], Diagnosis.SYNTAX),
        ("<tool_call>" + '{"name": "sell", "arguments": ' + "[" * 1500, Diagnosis.SYNTAX),
        (CALL.replace("sell", "sail"), Diagnosis.UNKNOWN_TOOL),
        (CALL.replace("2", '"two"'), Diagnosis.SCHEMA),
        ("x" * 100_000, Diagnosis.SYNTAX),
    ],
    ids=["malformed", "nested", "unknown tool", "bad arguments", "enormous"],
)
async def test_a_bad_message_is_an_observation_and_a_penalty_never_an_error(client, shop, text, diagnosis):
    opened = await shop.open(client)
    answer = await client.step(opened.handle, 0, TextAction(format="hermes", text=text), timeout=20)
    assert answer.diagnosis is diagnosis
    assert answer.parts["format"] < 0
    assert not answer.done
    assert answer.messages
    assert answer.parts["progress"] == 0.0
    after = await client.step(opened.handle, 1, shop.says(("sell", {"pieces": 1})), timeout=20)
    assert after.results[0].content == "sold 1, call 1"
    await client.close(opened.handle)


async def test_invalid_calls_are_answered_beside_those_that_run(client, shop):
    opened = await shop.open(client)
    calls = [("sell", {"pieces": 1}), ("sail", {}), ("sell", "not json"), ("sell", {"pieces": 4})]
    answer = await client.step(opened.handle, 0, shop.says(*calls), timeout=20)
    assert [r.status for r in answer.results] == [ToolStatus.OK] + [
        ToolStatus.INVALID
    ] * 3  # the fourth is one too many
    assert [r.call_id for r in answer.results] == ["c0", "c1", "c2", "c3"]
    assert "at most 3 calls" in answer.results[3].content
    await client.close(opened.handle)


async def test_a_step_that_is_sent_again_gets_the_same_answer_and_runs_nothing(client, shop):
    opened = await shop.open(client)
    action = shop.says(("sell", {"pieces": 1}))
    answers = [await client.step(opened.handle, 0, action, timeout=20) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0].results[0].content == "sold 1, call 1"
    following = await client.step(opened.handle, 1, action, timeout=20)
    assert following.results[0].content == "sold 1, call 2"
    await client.close(opened.handle)


async def test_the_same_index_with_another_action_is_a_conflict(client, shop):
    opened = await shop.open(client)
    await client.step(opened.handle, 0, shop.says(("sell", {"pieces": 1})), timeout=20)
    with pytest.raises(StepConflict):
        await client.step(opened.handle, 0, shop.says(("sell", {"pieces": 2})), timeout=20)
    await client.close(opened.handle)


async def test_an_open_that_is_sent_again_gets_the_same_episode(client, shop):
    one, two = await asyncio.gather(*[shop.open(client, request_id="twice") for _ in range(2)])
    three = await shop.open(client, request_id="twice")
    assert one.episode_id == two.episode_id == three.episode_id
    await client.step(one.handle, 0, shop.says(("sell", {"pieces": 1})), timeout=20)
    answer = await client.step(three.handle, 1, shop.says(("sell", {"pieces": 1})), timeout=20)
    assert answer.results[0].content == "sold 1, call 2"
    await client.close(one.handle)


async def test_an_environment_that_cannot_reset_says_so_and_holds_no_slot(client, shop):
    for _ in range(6):
        with pytest.raises(EnvironmentCodeError, match="the shelf fell over"):
            await shop.open(client, **{"break": True})


async def test_a_lost_slot_ends_the_episode_without_a_reward(client, shop):
    opened = await shop.open(client)
    await client.close(opened.handle)
    answer = await client.step(opened.handle, 0, shop.says(("sell", {"pieces": 1})), timeout=20)
    assert answer.done
    assert answer.outcome.kind == "infra_failed"
    assert "slot" in answer.outcome.detail
    assert answer.reward is None
    assert set(answer.parts.values()) == {None}


async def test_forged_and_foreign_handles_are_rejected(client, shop):
    opened = await shop.open(client)
    head, payload, signature = opened.handle.split(".")
    for handle in (
        "",
        "x",
        f"{head}.{payload}.{signature[:-2]}AA",
        f"{head}.{payload[:-4]}AAAA.{signature}",
        "é." * 5000,
    ):
        with pytest.raises(Rejected):
            await client.step(handle, 0, shop.says(), timeout=20)
        with pytest.raises(Rejected):
            await client.close(handle)
    await client.close(opened.handle)


async def test_opens_wait_in_line_for_slots_and_fail_with_the_cause_at_their_deadline(client, shop):
    opened = [await shop.open(client) for _ in range(4)]
    with pytest.raises(Unavailable, match="all 4 slots of 1 hosts are busy") as refusal:
        await shop.open(client, timeout=1.0)
    assert refusal.value.retry_after_s == 1.0
    order = []

    async def wait(number):
        episode = await shop.open(client)
        order.append(number)
        await client.close(episode.handle)

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(wait(number))
            await asyncio.sleep(0)  # one stream carries them in the order in which they ask
        await client.close(opened[0].handle)
    assert order == [0, 1, 2]
    for episode in opened[1:]:
        await client.close(episode.handle)


async def test_unary_calls_give_the_same_answers_as_the_stream(gateway, shop):
    async with connect(gateway.address, token=gateway.token) as channel:
        stub = episode_pb2_grpc.EpisodeServiceStub(channel)
        task = types_pb2.Task(id="train-0", prompt=[types_pb2.Message(role="user", content="go")])
        request = episode_pb2.OpenRequest(environment=shop.environment, task=task)
        one, two = await stub.Open(request, timeout=20), await stub.Open(request, timeout=20)
        assert one.episode_id != two.episode_id
        text = episode_pb2.TextAction(format="hermes", text=CALL)
        unary = await stub.Step(episode_pb2.StepRequest(handle=one.handle, text=text), timeout=20)
        command = episode_pb2.Command(id=5, step=episode_pb2.StepRequest(handle=two.handle, text=text))
        stream = stub.Interact(iter([episode_pb2.InteractRequest(commands=[command])]))
        (batch,) = [response async for response in stream]
        assert [reply.id for reply in batch.replies] == [5]
        assert _without_seconds(unary) == _without_seconds(batch.replies[0].step)
        with pytest.raises(grpc.aio.AioRpcError) as conflict:
            await stub.Step(episode_pb2.StepRequest(handle=one.handle), timeout=20)
        assert conflict.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for handle in (one.handle, two.handle):
            await stub.Close(episode_pb2.CloseRequest(handle=handle), timeout=20)


def _without_seconds(response):
    plain = json_format.MessageToDict(response)
    plain.pop("seconds", None)
    for result in plain["results"]:
        result.pop("seconds", None)
    return plain


async def test_without_the_token_nothing_is_served_but_health(gateway):
    async with connect(gateway.address) as channel:
        with pytest.raises(Rejected, match="no valid bearer token"):
            async with EpisodeClient(channel) as client:
                await client.describe()
        health = health_pb2_grpc.HealthStub(channel)
        status = await health.Check(health_pb2.HealthCheckRequest(service="envfarm.v1.EpisodeService"), timeout=10)
        assert status.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_lists_the_services(gateway):
    async with connect(gateway.address, token=gateway.token) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        async for response in stub.ServerReflectionInfo(iter([asked])):
            names = {service.name for service in response.list_services_response.service}
            assert {"envfarm.v1.EpisodeService", "envfarm.v1.TrajectoryService", "envfarm.v1.RunService"} <= names


async def test_commands_that_make_no_sense_fail_alone_with_typed_errors(gateway, shop):
    async with connect(gateway.address, token=gateway.token) as channel, gateway.client() as client:
        opened = await shop.open(client)
        commands = [
            episode_pb2.Command(id=1),
            episode_pb2.Command(id=2, step=episode_pb2.StepRequest(handle="x")),
            episode_pb2.Command(id=3, step=episode_pb2.StepRequest(handle=opened.handle), timeout_s=float("nan")),
            episode_pb2.Command(id=4, open=episode_pb2.OpenRequest(environment=shop.environment)),
            episode_pb2.Command(id=5, open=episode_pb2.OpenRequest(environment="nowhere"), timeout_s=float("inf")),
            episode_pb2.Command(id=6, close=episode_pb2.CloseRequest(handle=opened.handle), timeout_s=-1.0),
        ]
        stub = episode_pb2_grpc.EpisodeServiceStub(channel)
        stream = stub.Interact(iter([episode_pb2.InteractRequest(commands=commands)]))
        replies = {reply.id: reply async for batch in stream for reply in batch.replies}
        assert sorted(replies) == [1, 2, 3, 4, 5, 6]
        errors = {number: from_status(replies[number].error) for number in range(1, 6)}
        assert isinstance(errors.pop(2), Rejected)
        assert all(isinstance(error, ConfigError) for error in errors.values())
        assert replies[6].WhichOneof("kind") == "close"
