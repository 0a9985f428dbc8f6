"""The catalogue's verdict on a call, and the sentence that says what to mend."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfarm.core.errors import ConfigError
from envfarm.core.messages import Diagnosis, ToolCall, ToolSchema
from envfarm.tools.validation import MAX_ARGUMENT_CHARACTERS, MAX_DETAIL, Catalogue

PARAMETERS = {
    "type": "object",
    "properties": {
        "item": {"type": "string", "minLength": 1},
        "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "unit": {"enum": ["box", "piece"]},
        "price": {"type": "number", "minimum": 0, "exclusiveMaximum": 100},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/Line"}, "maxItems": 2},
        "code": {"type": "string", "pattern": "^[A-Z]+$"},
    },
    "required": ["item"],
    "additionalProperties": False,
    "$defs": {
        "Line": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}


def schema(name="stock", parameters=PARAMETERS):
    return ToolSchema(name=name, description="", parameters=json.dumps(parameters))


CATALOGUE = Catalogue([schema(), schema("answer"), schema("search_items")])


def check(arguments, name="stock"):
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return CATALOGUE.check(ToolCall("call_0", name, text))


def test_a_call_that_fits_is_ok_and_needs_no_words():
    verdict = check({"item": "mug", "count": None, "unit": "box", "price": 2, "lines": [{"name": "a"}]})
    assert (verdict.ok, verdict.diagnosis, verdict.detail) == (True, Diagnosis.OK, "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "stock: the call lacks item."),
        ({"item": 3}, "stock: item must be a string, got 3."),
        ({"item": ""}, 'stock: item must be at least 1 characters, got "".'),
        ({"item": "a", "count": "3"}, 'stock: count must be an integer or null, got "3".'),
        ({"item": "a", "unit": "crate"}, 'stock: unit must be one of "box", "piece", got "crate".'),
        ({"item": "a", "price": -1}, "stock: price must be at least 0, got -1."),
        ({"item": "a", "price": 100}, "stock: price must be less than 100, got 100."),
        ({"item": "a", "code": "x"}, 'stock: code must be text that matches "^[A-Z]+$", got "x".'),
        ({"item": "a", "lines": {}}, "stock: lines must be an array, got {}."),
        ({"item": "a", "lines": [{"name": "b"}] * 3}, "stock: lines must be at most 2 items, got "),
        ({"item": "a", "lines": [{"size": 1}]}, "stock: lines[0] lacks name."),
        ({"item": "a", "lines": [{"name": 1}]}, "stock: lines[0].name must be a string, got 1."),
        ({"item": "a", "lines": [{"name": "b", "sise": 1}]}, "stock: lines[0] has no field sise, perhaps size."),
        ({"item": "a", "cuont": 1}, "stock: the call has no field cuont, perhaps count."),
        ({"item": "a", "zzz": 1}, "stock: the call has no field zzz, only item, count, unit, price, lines, code."),
        ({"item": "a", "a b": 1}, "stock: the call has no field 'a b', only "),
    ],
)
def test_a_misfit_is_told_by_path_expectation_and_what_came(arguments, sentence):
    verdict = check(arguments)
    assert verdict.diagnosis is Diagnosis.SCHEMA
    assert verdict.detail.startswith(sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "ends too early"),
        ('{"item": "a"', "ends too early"),
        ("{'item': 'a'}", "keys must be strings"),
        ("[1]", "must be a JSON object, got '[1]'"),
        ('"item"', "must be a JSON object"),
        ("null", "must be a JSON object"),
        ('{"price": 1e999}', "out of range"),
        ('{"item": NaN}', "invalid character"),
        ("\ud800", "cannot be read"),
        ('{"item":' * 65 + "1" + "}" * 65, "nest deeper than 64 levels"),
        (" " * (MAX_ARGUMENT_CHARACTERS + 1), "characters long"),
    ],
)
def test_arguments_that_are_no_object_in_json_are_a_syntax_fault(arguments, sentence):
    verdict = check(arguments)
    assert verdict.diagnosis is Diagnosis.SYNTAX
    assert sentence in verdict.detail


def test_brackets_in_strings_are_no_nesting():
    assert check({"item": "[{" * 500 + '\\"' + "[" * 500}).ok


def test_an_unknown_tool_is_told_with_a_near_name():
    verdict = check({}, "serch_items")
    assert verdict.diagnosis is Diagnosis.UNKNOWN_TOOL
    assert verdict.detail == "There is no tool named serch_items; did you mean search_items?"


def test_an_unknown_tool_far_from_every_name_is_told_with_the_names():
    assert check({}, "xyz").detail == "There is no tool named xyz; the tools are: stock, answer, search_items."
    assert Catalogue([]).check(ToolCall("0", "f", "{}")).detail == "There is no tool named f; there are no tools."


@given(st.text(max_size=2000), st.text(max_size=2000))
@settings(deadline=None)
def test_a_verdict_is_short_whatever_the_call(name, value):
    for verdict in (check({"item": [value]}), check({"item": "a", name: value}), check({}, name), check(value)):
        assert len(verdict.detail) <= MAX_DETAIL


def test_a_catalogue_refuses_two_tools_of_one_name():
    with pytest.raises(ConfigError, match="'stock'; rename one"):
        Catalogue([schema(), schema()])


@pytest.mark.parametrize("parameters", [[], {"type": "objekt"}, {"$ref": "http://nowhere.invalid/x"}, {"$ref": "#/no"}])
def test_a_catalogue_refuses_what_is_no_schema(parameters):
    with pytest.raises(ConfigError, match="tool 'stock': its parameters are no JSON schema"):
        Catalogue([schema(parameters=parameters)])


def test_a_schema_never_makes_the_farm_open_a_connection():
    with pytest.raises(ConfigError, match="outside the schema"):
        Catalogue([schema(parameters={"$ref": "http://127.0.0.1:1/x"})])


def test_a_pattern_that_could_backtrack_without_end_is_matched_in_linear_time():
    catalogue = Catalogue(
        [schema(parameters={"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}})]
    )
    assert not catalogue.check(ToolCall("0", "stock", json.dumps({"a": "a" * 10_000 + "!"}))).ok
