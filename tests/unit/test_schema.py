"""Schemas from annotations and docstrings, and arguments back from JSON."""

import dataclasses
import enum
import inspect
import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, TypedDict

import jsonschema_rs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfarm.core.environment import Environment, Toolset, tool
from envfarm.core.errors import ConfigError, ToolError
from envfarm.core.messages import ToolCall
from envfarm.tools.schema import call_arguments, catalogue_hash, functions, schemas, tool_schema
from envfarm.tools.validation import Catalogue

if TYPE_CHECKING:
    from nowhere import Missing


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Line:
    item: str
    title: str = "none"


class Order(msgspec.Struct):
    lines: list[Line]
    parent: Optional["Order"] = None


class Point(TypedDict):
    x: float


class Pen(Toolset):
    @tool
    def draw(self, at: tuple[int, int]) -> None:
        """Draw."""


class Shop(Environment):
    toolsets = (Pen,)

    @tool
    def quantity(self, item: str, colour: Colour = Colour.RED, limit: int | None = None) -> int:
        """Units of `item`
        on the shelf.

        Reserved units count.

        Args:
            item: name of the item,
                as the label has it
            limit (int): count no further

        Returns:
            item: not a parameter
        """

    @tool(name="order-now", ends=True, timeout_s=2.5)
    async def order(self, order: Order) -> "Missing":
        """Order."""


def parameters(function) -> dict[str, Any]:
    return json.loads(tool_schema(function).parameters)


def properties(function) -> dict[str, Any]:
    return parameters(function)["properties"]


def test_summary_and_parameter_notes_come_from_the_docstring():
    schema = tool_schema(Shop.quantity)
    assert schema.description == "Units of `item` on the shelf.\nReserved units count."
    known = properties(Shop.quantity)
    assert known["item"]["description"] == "name of the item, as the label has it"
    assert known["limit"]["description"] == "count no further"
    assert "description" not in known["colour"]


def test_defaults_make_parameters_optional_and_are_shown():
    schema = parameters(Shop.quantity)
    assert schema["required"] == ["item"]
    assert schema["properties"]["colour"]["default"] == "red"
    assert schema["properties"]["limit"]["default"] is None
    assert schema["additionalProperties"] is False


def test_a_function_without_parameters_takes_an_empty_object():
    def ping(self) -> str: ...

    assert parameters(ping) == {"type": "object", "properties": {}, "additionalProperties": False}


def test_the_mark_says_name_end_and_time():
    schema = tool_schema(Shop.order)
    assert (schema.name, schema.ends, schema.timeout_s) == ("order-now", True, 2.5)


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (Any, {}),
        (Literal["a", "b"], {"enum": ["a", "b"]}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (Annotated[int, msgspec.Meta(ge=1, le=6)], {"type": "integer", "minimum": 1, "maximum": 6}),
        (str | None, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
    ],
)
def test_types_become_their_schemas(hint, expected):
    def f(x): ...

    f.__annotations__["x"] = hint
    assert properties(f)["x"] == expected


def test_nested_types_are_defined_once_and_closed_and_untitled():
    schema = parameters(Shop.order)
    assert schema["properties"]["order"] == {"$ref": "#/$defs/Order"}
    line = schema["$defs"]["Line"]
    assert line["additionalProperties"] is False
    assert set(line["properties"]) == {"item", "title"}
    assert "title" not in line


def test_a_typed_dict_and_a_tuple_are_expressed():
    def f(p: Point, t: tuple[int, str]): ...

    assert properties(f)["t"]["prefixItems"] == [{"type": "integer"}, {"type": "string"}]
    assert parameters(f)["$defs"]["Point"]["required"] == ["x"]


def test_a_default_that_no_json_can_say_is_left_out():
    def f(x: int = object()): ...

    assert properties(f)["x"] == {"type": "integer"}
    assert call_arguments(f, "{}") == {}


def bare(x): ...
def spread(*numbers: int): ...
def keywords(**numbers: int): ...
def positional(x: int, /): ...
def custom(x: inspect.Signature): ...
def unresolved(x: "Nowhere"): ...  # noqa: F821


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (bare, "tool bare: parameter 'x' has no annotation; write x: str"),
        (spread, "tool spread: .*numbers.* cannot be called by name"),
        (keywords, "tool keywords: .*numbers.* cannot be called by name"),
        (positional, "tool positional: x: int cannot be called by name"),
        (custom, "tool custom: .*Signature.* is not supported"),
        (unresolved, "tool unresolved: an annotation cannot be resolved .*Nowhere"),
    ],
)
def test_what_a_schema_cannot_say_is_told_with_the_remedy(function, sentence):
    with pytest.raises(ConfigError, match=sentence):
        tool_schema(function)


@pytest.mark.parametrize("name", ["two words", "", "a" * 65, "1st", "f\n"])
def test_a_name_that_no_template_takes_is_refused(name):
    class Odd(Environment):
        @tool(name=name or " ")
        def f(self) -> None: ...

    with pytest.raises(ConfigError, match="tool name"):
        schemas(Odd)


def test_an_environment_shows_its_own_tools_and_those_of_its_toolsets():
    assert [s.name for s in schemas(Shop)] == ["quantity", "order-now", "draw"]
    assert schemas(Shop) == schemas(Shop()) == schemas(Shop(), [Pen()])
    assert [s.name for s in schemas(Pen)] == ["draw"]


def test_functions_are_bound_to_the_instances_given():
    shop, pen = Shop(), Pen()
    found = functions(shop, [pen])
    assert found["quantity"][0].__self__ is shop
    assert found["draw"][0].__self__ is pen


def test_two_tools_of_one_name_are_refused_with_both_owners():
    class Painter(Environment):
        toolsets = (Pen,)

        @tool
        def draw(self) -> None: ...

    with pytest.raises(ConfigError, match="'draw': one of Painter, one of Pen; rename"):
        schemas(Painter)


def test_the_catalogue_hash_follows_what_the_model_sees():
    tools = schemas(Shop)
    assert catalogue_hash(tools) == catalogue_hash(schemas(Shop()))
    assert catalogue_hash(tools) != catalogue_hash(tools[::-1])
    changed = msgspec.structs.replace(tools[0], description="Else.")
    assert catalogue_hash((changed, *tools[1:])) != catalogue_hash(tools)
    timed = msgspec.structs.replace(tools[0], timeout_s=1.0)
    assert catalogue_hash((timed, *tools[1:])) == catalogue_hash(tools)


def test_arguments_are_converted_to_the_annotated_types():
    assert call_arguments(Shop().quantity, '{"item": "mug", "colour": "blue"}') == {
        "item": "mug",
        "colour": Colour.BLUE,
    }
    text = '{"order": {"lines": [{"item": "mug"}], "parent": {"lines": []}}}'
    assert call_arguments(Shop.order, text) == {"order": Order([Line("mug")], Order([]))}


def test_only_lossless_conversions_are_made():
    def f(n: int, r: float = 0.0): ...

    assert call_arguments(f, '{"n": 3.0, "r": 2}') == {"n": 3, "r": 2.0}
    for text in ('{"n": 3.5}', '{"n": "3"}', '{"n": true}', '{"n": 1, "r": "2"}', '{"n": null}', '{"n": 1e999}'):
        with pytest.raises(ToolError, match="do not fit"):
            call_arguments(f, text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{}", "missing required field 'item'"),
        ('{"item": "a", "itm": 1}', "unknown field 'itm'"),
        ('{"item": 1}', "Expected 'str', got 'int' at 'item'"),
        ('{"item": ' + "[" * 100_000, "nest deeper than 64 levels"),
        ('{"item"', "truncated"),
        ("\ud800", "invalid character"),
        ("[]", "Expected 'object'"),
    ],
)
def test_arguments_that_do_not_fit_are_explained_to_the_model(text, sentence):
    with pytest.raises(ToolError, match=sentence):
        call_arguments(Shop.quantity, text)


class Everything(Environment):
    @tool
    def all(
        self,
        s: str,
        i: int,
        f: float,
        c: Colour,
        choice: Literal["a", 1],
        line: Line,
        numbers: list[float] | None = None,
        table: dict[str, list[int]] = {},  # noqa: B006 - a default to show
        pair: tuple[int, str] = (1, "a"),
    ) -> None:
        """All."""


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_whatever_the_schema_allows_can_be_converted(data):
    value = {
        "s": data.draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=5)),
        "i": data.draw(st.integers(-(10**20), 10**20) | st.integers(-9, 9).map(float)),
        "f": data.draw(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9)),
        "c": data.draw(st.sampled_from(["red", "blue"])),
        "choice": data.draw(st.sampled_from(["a", 1, 1.0])),
        "line": {"item": "a"},
    }
    if data.draw(st.booleans()):
        value["numbers"] = data.draw(st.none() | st.lists(st.integers(0, 3), max_size=3))
        value["table"] = {"k": [1]}
        value["pair"] = [1.0, "b"]
    (schema,) = schemas(Everything)
    text = json.dumps(value)
    jsonschema_rs.validate(json.loads(schema.parameters), value)
    assert Catalogue([schema]).check(ToolCall("0", "all", text)).ok
    converted = call_arguments(Everything.all, text)
    assert set(converted) == set(value)
    assert isinstance(converted["i"], int)
    assert isinstance(converted["f"], float)


def test_two_methods_of_one_class_cannot_be_the_same_tool():
    class Twice(Toolset):
        @tool
        def look(self) -> str:
            """Look."""

        @tool(name="look")
        def look_again(self) -> str:
            """Look again."""

    with pytest.raises(ConfigError, match=r"two tools of Twice are named 'look': the methods look and look_again"):
        schemas(Twice)
