"""Admission: what a policy writes becomes calls, observations and a grade; never an exception."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfarm.core.errors import ConfigError
from envfarm.core.messages import Diagnosis, ToolStatus
from envfarm.core.task import Limits
from envfarm.gateway.admission import admit
from envfarm.gateway.served import Served
from envfarm.wire.convert.enums import DIAGNOSIS_TO_PB
from envfarm.wire.convert.tasks import limits_to_pb
from envfarm.wire.v1 import episode_pb2, types_pb2

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
LIMITS = Limits(calls_per_step=3, message_bytes=2000)
SERVED = Served(
    types_pb2.EnvironmentInfo(
        name="shop",
        version="1",
        tools=[types_pb2.ToolSchema(name="sell", parameters=msgspec.json.encode(SCHEMA).decode())],
        limits=limits_to_pb(LIMITS),
    )
)
GOOD = ("sell", '{"n": 1}')


def message(*calls, diagnosis=None, content="", detail="", ids=None):
    made = [types_pb2.ToolCall(id=f"c{i}", name=name, arguments=text) for i, (name, text) in enumerate(calls)]
    for call, name in zip(made, ids or [], strict=False):
        call.id = name
    grade = DIAGNOSIS_TO_PB[diagnosis] if diagnosis is not None else 0
    pb = types_pb2.AssistantMessage(content=content, tool_calls=made, diagnosis=grade, detail=detail)
    return episode_pb2.StepRequest(message=pb)


def text(words, truncated=False):
    return episode_pb2.StepRequest(text=episode_pb2.TextAction(format="hermes", text=words), truncated=truncated)


def test_a_good_call_runs_and_is_graded_ok():
    admitted = admit(message(GOOD), SERVED)
    assert [c.name for c in admitted.runnable] == ["sell"]
    assert admitted.message.diagnosis is Diagnosis.OK
    assert not admitted.invalid
    assert not admitted.malformed


def test_a_message_without_calls_is_graded_none_whatever_the_client_says():
    for claimed in (None, Diagnosis.OK, Diagnosis.SCHEMA):
        assert admit(message(content="hello", diagnosis=claimed), SERVED).message.diagnosis is Diagnosis.NONE


def test_the_worst_call_sets_the_grade_and_its_sentence():
    admitted = admit(message(GOOD, ("sail", "{}"), ("sell", '{"n": "x"}')), SERVED)
    assert admitted.message.diagnosis is Diagnosis.SCHEMA
    assert admitted.message.detail.startswith("sell: n must be an integer")
    assert [r.status for r in admitted.invalid] == [ToolStatus.INVALID] * 2
    assert len(admitted.runnable) == 1


def test_a_grade_of_the_client_is_never_made_better():
    admitted = admit(message(GOOD, diagnosis=Diagnosis.TRUNCATED), SERVED)
    assert admitted.message.diagnosis is Diagnosis.TRUNCATED
    assert len(admitted.runnable) == 1


@pytest.mark.parametrize("grade", [Diagnosis.SYNTAX, Diagnosis.TRUNCATED])
def test_a_message_of_which_no_call_could_be_read_is_answered_by_the_user(grade):
    assert admit(message(diagnosis=grade, detail="no brace"), SERVED).malformed == "no brace"
    assert admit(message(diagnosis=grade), SERVED).malformed


def test_calls_beyond_the_limit_are_refused_and_the_reply_stays_bounded():
    admitted = admit(message(*[GOOD] * 50), SERVED)
    assert len(admitted.runnable) == 3
    assert len(admitted.invalid) == 3
    assert len(admitted.message.tool_calls) == 6
    assert admitted.message.diagnosis is Diagnosis.SCHEMA


@pytest.mark.parametrize("ids", [("a", "a"), ("", "b")])
def test_call_ids_that_do_not_tell_calls_apart_are_replaced(ids):
    admitted = admit(message(GOOD, GOOD, ids=ids), SERVED)
    assert [c.id for c in admitted.runnable] == ["call_0", "call_1"]


@pytest.mark.parametrize(
    "request_",
    [text("x" * 2001), text("é" * 1001), message(content="é" * 1001), message(("sell", " " * 2001))],
    ids=["text", "bytes of text", "message", "arguments"],
)
def test_more_bytes_than_allowed_run_nothing(request_):
    admitted = admit(request_, SERVED)
    assert not admitted.runnable
    assert admitted.message.diagnosis is Diagnosis.SYNTAX
    assert "longer than 2000 bytes" in admitted.malformed


def test_a_truncated_text_is_graded_as_such():
    admitted = admit(text('<tool_call>\n{"name": "sell", "argu', truncated=True), SERVED)
    assert admitted.message.diagnosis is Diagnosis.TRUNCATED
    assert admitted.malformed


def test_a_request_without_an_action_or_with_an_unknown_format_is_the_clients_error():
    with pytest.raises(ConfigError, match="holds no action"):
        admit(episode_pb2.StepRequest(index=4), SERVED)
    odd = episode_pb2.StepRequest(text=episode_pb2.TextAction(format="cobol", text="x" * 5000))
    with pytest.raises(ConfigError, match="cobol"):
        admit(odd, SERVED)


names = st.sampled_from(["sell", "sail", "", "séll"]) | st.text(max_size=20)
arguments = st.sampled_from(['{"n": 1}', "{", "[" * 3000, '{"n": 1e400}', ""]) | st.text(max_size=50)


@given(st.lists(st.tuples(names, arguments), max_size=12), st.sampled_from([None, *Diagnosis]), st.text(max_size=50))
@settings(deadline=None, max_examples=150)
def test_every_message_is_admitted_with_an_answer_for_each_call_that_is_kept(calls, diagnosis, content):
    admitted = admit(message(*calls, diagnosis=diagnosis, content=content), SERVED)
    kept = [c.id for c in admitted.message.tool_calls]
    answered = [c.id for c in admitted.runnable] + [r.call_id for r in admitted.invalid]
    assert sorted(kept) == sorted(answered)
    assert len(admitted.runnable) <= LIMITS.calls_per_step
    assert (admitted.message.diagnosis is Diagnosis.NONE) == (not calls and not admitted.malformed)


@given(st.text(max_size=300) | st.text(alphabet='<tool_call>{}"name: arguments/[],sell1', max_size=300), st.booleans())
@settings(deadline=None, max_examples=150)
def test_every_text_is_admitted(words, truncated):
    admit(text(words, truncated), SERVED)
