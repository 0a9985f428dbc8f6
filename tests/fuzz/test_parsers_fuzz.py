"""Hostile text: parsers and validation answer every one of it, in time that grows no faster than the text."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfarm.core.messages import Diagnosis, ToolCall, ToolSchema
from envfarm.tools.parsers import formats, parse
from envfarm.tools.validation import MAX_DETAIL, Catalogue

pytestmark = pytest.mark.fuzz

PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    '{"name": "f", "arguments": {',
    '"',
    "\\",
    '\\"',
    "{",
    "}",
]
PIECES += [
    "[",
    "]",
    ",",
    ":",
    "\n",
    "<",
    ">",
    "/",
    "1e999",
    "null",
    '"arguments"',
    '"name"',
    "é",
    "\ud800",
    "\x00",
    " ",
]
soup = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=60).map("".join)
UNITS = [
    "<tool_call>",
    "</tool_call>",
    '<tool_call>{"',
    '<tool_call>{\\"</tool_call>',
    '<tool_call>"</tool_call>',
    "<",
    '"',
]
UNITS += [
    '\\"',
    "{",
    "[",
    "<tool_call>[",
    '<tool_call>"<',
    '<tool_call>"\\',
    '"\n<tool_call>',
    '<tool_call>"\n</tool_call>',
]
UNITS += [
    "<think>",
    "</think>",
    '<tool_call>{"a":["</tool_call>',
    '<tool_call>{"name": "x", "arguments": {}}</tool_call>',
]
CATALOGUE = Catalogue(
    [
        ToolSchema(
            name="f",
            description="",
            parameters='{"type":"object","properties":{"a":{},"b":{"type":"integer"}},"additionalProperties":false}',
        )
    ]
)


@given(text=soup, truncated=st.booleans(), dialect=st.sampled_from(formats()))
@settings(deadline=None, max_examples=3000)
def test_no_text_raises_and_every_call_is_an_object_in_json(text, truncated, dialect):
    message = parse(dialect, text, truncated=truncated)
    assert message == parse(dialect, text, truncated=truncated)
    assert len({c.id for c in message.tool_calls}) == len(message.tool_calls)
    for call in message.tool_calls:
        assert call.arguments.lstrip().startswith("{")
    assert len(message.detail) <= 400
    (message.content + message.reasoning + message.detail).encode()


@given(name=st.sampled_from(["f", "ff", "", "\ud800"]) | st.text(max_size=5), arguments=soup)
@settings(deadline=None, max_examples=3000)
def test_no_arguments_make_validation_raise(name, arguments):
    verdict = CATALOGUE.check(ToolCall("call_0", name, arguments))
    assert verdict.ok == (not verdict.detail)
    assert len(verdict.detail) <= MAX_DETAIL


def seconds(function, *arguments):
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        function(*arguments)
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("before", "after"), [("", ""), ("<tool_call>", "</tool_call>"), ('<tool_call>"', '"')])
@pytest.mark.parametrize("dialect", formats())
def test_repeats_take_linear_time(unit, before, after, dialect):
    def text(size):
        return before + unit * (size // len(unit)) + after

    small, large = (seconds(parse, dialect, text(size)) for size in (20_000, 320_000))
    assert large < 0.002 + 16 * small * 4  # 16 times the text; quadratic time would be 256 times


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize("size", [100, 100_000, 2_000_000])
def test_nesting_of_any_depth_is_a_syntax_fault_and_no_recursion(opening, size):
    verdict = CATALOGUE.check(ToolCall("call_0", "f", '{"a":' + opening * size))
    assert verdict.diagnosis is Diagnosis.SYNTAX


def test_a_huge_misfit_is_told_in_one_short_sentence():
    verdict = CATALOGUE.check(ToolCall("call_0", "f", '{"b": "' + "x" * 900_000 + '"}'))
    assert verdict.diagnosis is Diagnosis.SCHEMA
    assert len(verdict.detail) < 150
