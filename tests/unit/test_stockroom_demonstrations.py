"""The clerk's conversations: right when clean, and flawed only as told."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from envfarm.core.messages import Diagnosis, ToolCall
from envfarm.tools.parsers import parse
from sandboxes.environments.stockroom import Stockroom
from sandboxes.environments.stockroom.demonstrations import CATALOGUE, Flaws, demonstrations
from sandboxes.environments.stockroom.questions import HELD_OUT_ITEMS

Json = dict[str, Any]


def some(count: int, flaws: Flaws | None = None, seed: int = 0) -> list[Json]:
    return list(itertools.islice(demonstrations(seed, flaws), count))


def calls_of(conversation: Json) -> list[tuple[str, Json]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for message in conversation["messages"]
        for call in message.get("tool_calls", ())
    ]


def tool_replies(conversation: Json) -> list[str]:
    return [message["content"] for message in conversation["messages"] if message["role"] == "tool"]


def test_a_clean_clerk_answers_with_the_last_result_after_two_to_four_calls() -> None:
    for conversation in some(120):
        calls = calls_of(conversation)
        assert 2 <= len(calls) <= 4
        assert calls[-1] == ("answer", {"value": int(tool_replies(conversation)[-1])})


def test_every_call_of_a_clean_clerk_fits_the_tools() -> None:
    for conversation in some(60):
        for name, arguments in calls_of(conversation):
            assert CATALOGUE.check(ToolCall("call_0", name, json.dumps(arguments))).ok


def test_conversations_have_the_shape_of_openai_chats_with_tools() -> None:
    for conversation in some(12):
        roles = [message["role"] for message in conversation["messages"]]
        assert roles[:3] == ["system", "user", "assistant"]
        assert roles[-1] == "assistant"
        assert conversation["messages"][0]["content"] == Stockroom.system_prompt
        assert [tool["function"]["name"] for tool in conversation["tools"]] == list(CATALOGUE.tools)


def test_a_seed_gives_the_same_conversations_and_another_seed_gives_others() -> None:
    assert some(20, seed=4) == some(20, seed=4)
    assert some(20, seed=4) != some(20, seed=5)


def test_no_conversation_names_a_held_out_item() -> None:
    for conversation in some(300):
        text = json.dumps(conversation["messages"])
        assert not any(item in text for item in HELD_OUT_ITEMS)


def test_a_clerk_that_skips_never_computes_and_answers_with_the_last_number_it_was_told() -> None:
    for conversation in some(60, Flaws(skip=1.0)):
        calls = calls_of(conversation)
        assert not {name for name, _ in calls} & {"add", "multiply", "compare"}
        assert calls[-1] == ("answer", {"value": int(tool_replies(conversation)[-1])})


def test_slips_are_recovered_from() -> None:
    for conversation in some(60, Flaws(slip=1.0)):
        numbers = [reply for reply in tool_replies(conversation) if reply.isdigit()]
        assert calls_of(conversation)[-1] == ("answer", {"value": int(numbers[-1])})


@pytest.mark.parametrize("flaws", [Flaws(slip=1.0), Flaws(slip=0.5, mistake=0.5, skip=0.5)])
def test_the_farm_would_say_the_same_of_every_bad_call(flaws: Flaws) -> None:
    seen: set[Diagnosis] = set()
    for conversation in some(60, flaws):
        for message, reply in itertools.pairwise(conversation["messages"]):
            if message["role"] != "assistant":
                continue
            if message["content"]:
                parsed = parse("hermes", message["content"])
                assert (parsed.tool_calls, reply) == ((), {"role": "user", "content": parsed.detail})
                seen.add(parsed.diagnosis)
                continue
            function = message["tool_calls"][0]["function"]
            verdict = CATALOGUE.check(ToolCall("call_0", function["name"], function["arguments"]))
            if not verdict.ok:
                assert reply == {"role": "tool", "content": f"error: {verdict.detail}"}
            seen.add(verdict.diagnosis)
    assert seen == {Diagnosis.OK, Diagnosis.SYNTAX, Diagnosis.SCHEMA}


def test_mistakes_make_some_answers_wrong_without_breaking_a_call() -> None:
    conversations = some(60, Flaws(mistake=1.0))
    assert conversations != some(60)
    for conversation in conversations:
        assert {m["role"] for m in conversation["messages"][1:]} == {"user", "assistant", "tool"}
