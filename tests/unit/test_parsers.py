"""Hermes and OpenAI parsers: what is well formed comes through whole, what is not is graded and explained."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfarm.core.errors import ConfigError
from envfarm.core.messages import Diagnosis, ToolCall
from envfarm.tools.parsers import formats, parse

OK, SYNTAX, TRUNCATED, NONE = Diagnosis.OK, Diagnosis.SYNTAX, Diagnosis.TRUNCATED, Diagnosis.NONE

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
plain = texts.filter(lambda t: "tool_call>" not in t and "think>" not in t).map(str.strip)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
tagged = st.sampled_from(["</tool_call>", "<tool_call>", "a <tool_call> b", '"</tool_call>\\"', "</think>", "<think>"])
arguments = st.dictionaries(texts | tagged, values | tagged, max_size=4)
calls = st.lists(st.tuples(texts.filter(bool), arguments), min_size=1, max_size=4)


def call(name="quantity", **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@given(reasoning=plain, before=plain, calls=calls, ascii_only=st.booleans(), indent=st.sampled_from([None, 2]))
@settings(deadline=None, max_examples=150)
def test_hermes_calls_come_back_as_they_were_written(reasoning, before, calls, ascii_only, indent):
    written = [
        json.dumps({"name": name, "arguments": values}, ensure_ascii=ascii_only, indent=indent)
        for name, values in calls
    ]
    text = f"<think>\n{reasoning}\n</think>\n\n{before}\n" + "\n".join(
        f"<tool_call>\n{body}\n</tool_call>" for body in written
    )
    message = parse("hermes", text)
    assert (message.diagnosis, message.detail) == (OK, "")
    assert (message.reasoning, message.content) == (reasoning, before)
    assert [c.id for c in message.tool_calls] == [f"call_{i}" for i in range(len(calls))]
    assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == calls


@given(text=st.text(max_size=200), truncated=st.booleans(), dialect=st.sampled_from(formats()))
@settings(deadline=None, max_examples=150)
def test_any_text_parses(text, truncated, dialect):
    message = parse(dialect, text, truncated=truncated)
    assert bool(message.detail) == (message.diagnosis in (SYNTAX, TRUNCATED))


@given(calls=calls, cut=st.integers(0, 400))
@settings(deadline=None, max_examples=150)
def test_a_text_cut_anywhere_is_never_graded_worse_than_truncated_and_keeps_the_whole_calls(calls, cut):
    bodies = [json.dumps({"name": name, "arguments": values}) for name, values in calls]
    text = "".join(f"<tool_call>{body}</tool_call>" for body in bodies)[:cut]
    message = parse("hermes", text, truncated=True)
    assert message.diagnosis in (OK, TRUNCATED, NONE)
    assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == calls[: len(message.tool_calls)]


def test_arguments_keep_the_very_text_that_the_model_wrote():
    text = '<tool_call>{"name": "f", "arguments": {"a":  1.0, "b": "\\u00e9"}}</tool_call>'
    assert parse("hermes", text).tool_calls == (ToolCall("call_0", "f", '{"a":  1.0, "b": "\\u00e9"}'),)


def test_text_around_calls_is_content():
    message = parse("hermes", f"First. {call(item='a')} Then {call(item='b')} done.")
    assert message.content == "First.  Then  done."
    assert len(message.tool_calls) == 2


def test_a_call_inside_reasoning_is_no_call():
    message = parse("hermes", f"<think>maybe {call()}</think>No.")
    assert (message.diagnosis, message.content, message.tool_calls) == (NONE, "No.", ())
    assert "quantity" in message.reasoning


def test_reasoning_whose_opening_tag_the_template_wrote_is_reasoning():
    message = parse("hermes", f"I should look.\n</think>\n\n{call()}")
    assert (message.reasoning, message.content, message.diagnosis) == ("I should look.", "", OK)


def test_reasoning_that_never_ends_holds_everything():
    message = parse("hermes", f"<think>let me {call()}", truncated=True)
    assert (message.diagnosis, message.content, message.tool_calls) == (NONE, "", ())


def test_a_malformed_call_does_not_take_its_neighbours_with_it_and_stays_in_the_content():
    broken = '<tool_call>\n{"name": "x}\n</tool_call>'
    message = parse("hermes", f"{call(n=1)}\n{broken}\n{call(n=2)}")
    assert [c.arguments for c in message.tool_calls] == ['{"n": 1}', '{"n": 2}']
    assert message.content == broken
    assert message.diagnosis is SYNTAX
    assert message.detail.startswith("Tool call 2 ")


CORPUS = [
    # (text, truncated, diagnosis, calls kept, part of the sentence)
    ("", False, NONE, 0, ""),
    ("The answer is 4.", False, NONE, 0, ""),
    ("The answer is", True, NONE, 0, ""),
    ('{"name": "f", "arguments": {}}', False, NONE, 0, ""),
    ("<tool_call>", False, SYNTAX, 0, "closing tag"),
    ("<tool_call>", True, TRUNCATED, 0, "token limit"),
    ("<tool_call></tool_call>", False, SYNTAX, 0, "too early"),
    ("</tool_call>", False, SYNTAX, 0, "no opening"),
    ("<tool_call>{}</tool_call>", False, SYNTAX, 0, "'name'"),
    ('<tool_call>{"name": "f"}</tool_call>', False, SYNTAX, 0, "'arguments'"),
    ('<tool_call>{"name": "f", "parameters": {}}</tool_call>', False, SYNTAX, 0, "'arguments'"),
    ('<tool_call>{"arguments": {}}</tool_call>', False, SYNTAX, 0, "'name'"),
    ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', False, SYNTAX, 0, "Expected 'str'"),
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', False, SYNTAX, 0, "must be a JSON object"),
    ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', False, SYNTAX, 0, "must be a JSON object"),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', False, SYNTAX, 0, "must be a JSON object"),
    ('<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', False, SYNTAX, 0, "Expected 'object'"),
    ("<tool_call>{'name': 'f', 'arguments': {}}</tool_call>", False, SYNTAX, 0, "keys must be strings"),
    ('<tool_call>{"name": "f" "arguments": {}}</tool_call>', False, SYNTAX, 0, "expected ',' or '}'"),
    ('<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>', False, SYNTAX, 0, "not valid JSON"),
    ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', False, SYNTAX, 0, "not valid JSON"),
    ('<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>', False, SYNTAX, 0, "not valid JSON"),
    ('<tool_call>{"name": "f", "arguments": {"a": "\\q"}}</tool_call>', False, SYNTAX, 0, "not valid JSON"),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', False, SYNTAX, 0, "too early"),
    ('<tool_call>{"name": "f", "arguments": {}}} </tool_call>', False, SYNTAX, 0, "trailing characters"),
    ("<tool_call>f(a=1)</tool_call>", False, SYNTAX, 0, "not valid JSON"),
    ('<tool_call>```json\n{"name": "f", "arguments": {}}\n```</tool_call>', False, SYNTAX, 0, "not valid JSON"),
    ('<tool_call>{"name": "f", "arguments": {}}', False, SYNTAX, 0, "closing tag"),
    ('<tool_call>{"name": "f", "arguments": {}}', True, TRUNCATED, 0, "token limit"),
    ('<tool_call>{"name": "f", "arguments": {"a": "long te', True, TRUNCATED, 0, "token limit"),
    ('<tool_call>{"name": "f", "arguments": {}}\n</tool_call', True, TRUNCATED, 0, "token limit"),
    ('<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"na', True, TRUNCATED, 1, "Tool call 2"),
    (
        '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        False,
        SYNTAX,
        1,
        "Tool call 1 has no closing tag",
    ),
    ('<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call></tool_call>', False, SYNTAX, 1, "Tool call 1"),
    ('{"name": "f", "arguments": {}}</tool_call>', False, SYNTAX, 0, "no opening"),
    ('<TOOL_CALL>{"name": "f", "arguments": {}}</TOOL_CALL>', False, NONE, 0, ""),
    (
        '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 65 + "]" * 65 + "}}</tool_call>",
        False,
        SYNTAX,
        0,
        "deeper",
    ),
    ('<tool_call>{"name": "f", "arguments": {"a": "' + "[" * 999 + '"}}</tool_call>', False, OK, 1, ""),
    ('<tool_call>{"name": "f", "arguments": {"a": "\ud800"}}</tool_call>', False, OK, 1, ""),
    ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>', True, TRUNCATED, 0, "token limit"),
    ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\\', True, TRUNCATED, 0, "token limit"),
    ("<tool_call>\x00</tool_call>", False, SYNTAX, 0, "not valid JSON"),
]


@pytest.mark.parametrize(("text", "truncated", "diagnosis", "kept", "sentence"), CORPUS)
def test_broken_outputs_are_graded_and_explained(text, truncated, diagnosis, kept, sentence):
    message = parse("hermes", text, truncated=truncated)
    assert (message.diagnosis, len(message.tool_calls)) == (diagnosis, kept)
    assert sentence in message.detail
    assert len(message.detail) < 300
    assert "<tool_call>" not in message.detail.split("at '")[0]


def test_surrogates_that_no_wire_can_carry_are_replaced():
    parse("hermes", f"\ud800 {call()}").content.encode()


def test_an_openai_message_comes_through_with_its_ids():
    made = [{"id": "a1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    message = parse("openai", json.dumps({"role": "assistant", "content": "hm", "tool_calls": made}))
    assert message.tool_calls == (ToolCall("a1", "f", '{"x": 1}'),)
    assert (message.content, message.diagnosis) == ("hm", OK)


def test_openai_calls_without_ids_of_their_own_are_counted():
    made = [{"id": "same", "function": {"name": "f", "arguments": "{}"}}] * 2
    message = parse("openai", json.dumps({"tool_calls": made}))
    assert [c.id for c in message.tool_calls] == ["call_0", "call_1"]


def test_an_openai_message_without_calls_is_text():
    message = parse("openai", '{"role": "assistant", "content": "4", "reasoning_content": "two and two"}')
    assert (message.diagnosis, message.content, message.reasoning) == (NONE, "4", "two and two")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("4", "Expected 'object'"),
        ("plain text", "not an assistant message"),
        ('{"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}', "tool call 1 are not valid JSON"),
        ('{"tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}', "not a JSON object"),
        ("[" * 100_000, "deeper"),
    ],
)
def test_broken_openai_messages_are_explained(text, sentence):
    message = parse("openai", text)
    assert message.diagnosis is SYNTAX
    assert sentence in message.detail


def test_an_unknown_format_lists_those_that_exist():
    with pytest.raises(ConfigError, match=r"'hermez'; did you mean 'hermes'\? \(there is: hermes, openai\)"):
        parse("hermez", "")
