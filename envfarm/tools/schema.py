"""JSON schema of a tool from its annotations and docstring, and the way back: JSON arguments to keyword arguments.

Types are those that :mod:`msgspec` knows: ``str``, ``int``, ``float``, ``bool``, ``None``, ``Optional`` and unions,
``Literal``, enums, ``list``, ``dict``, ``tuple``, ``set``, dataclasses, structs, ``TypedDict``, ``Any``, and
``Annotated[..., msgspec.Meta(ge=0)]`` for bounds. Descriptions come from a Google-style docstring.
"""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec

from envfarm.core.environment import MARK, Environment, ToolMark, Toolset, marked_tools
from envfarm.core.errors import ConfigError, ToolError
from envfarm.core.ids import digest
from envfarm.core.messages import ToolSchema
from envfarm.tools.docstrings import described
from envfarm.tools.payload import MAX_DEPTH, encodable, too_deep

Function = Callable[..., Any]
Owner = Environment | Toolset | type[Environment] | type[Toolset]
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_EXACT_INTEGERS = 2**53  # a float above it no longer says which integer was meant


def tool_schema(function: Function, mark: ToolMark | None = None) -> ToolSchema:
    """The schema of ``function`` as a tool; ``mark`` defaults to the one that ``@tool`` left on it.

    ``parameters`` is a JSON schema of type ``object`` that allows no other properties. Raises :class:`ConfigError`
    for what a schema cannot say: a parameter without annotation, ``*args``, ``**kwargs``, positional-only
    parameters, unknown types, a name that no chat template takes.
    """
    mark = mark or getattr(function, MARK, None) or ToolMark(name=function.__name__)
    if not _NAME.fullmatch(mark.name):
        raise ConfigError(
            f"tool name {mark.name!r} does not fit: use a letter, then up to 63 letters, digits, '_' or '-'"
        )
    summary, notes = described(function)
    arguments = _arguments(_key(function))
    return ToolSchema(
        name=mark.name,
        description=summary,
        parameters=msgspec.json.encode(_parameters(arguments, notes, mark.name)).decode(),
        ends=mark.ends,
        timeout_s=mark.timeout_s,
    )


def functions(
    owner: Owner, toolsets: Iterable[Toolset | type[Toolset]] | None = None
) -> dict[str, tuple[Function, ToolMark]]:
    """Every tool by name: those of ``owner``, then those of its toolsets, in the order of definition.

    ``toolsets`` are the instances that serve this owner (a host has made them); without them the owner's
    ``toolsets`` are looked up. Raises :class:`ConfigError` that names both owners of a name given twice.
    """
    if toolsets is None:
        toolsets = _own_toolsets(owner)
    found: dict[str, tuple[Function, ToolMark]] = {}
    owners: dict[str, str] = {}
    for part in (owner, *toolsets):
        label = part.__name__ if isinstance(part, type) else type(part).__name__
        for name, tool in marked_tools(part).items():
            if name in found:
                raise ConfigError(
                    f"two tools are named {name!r}: one of {owners[name]}, one of {label}; "
                    f"rename one with @tool(name=...)"
                )
            found[name], owners[name] = tool, label
    return found


def schemas(owner: Owner, toolsets: Iterable[Toolset | type[Toolset]] | None = None) -> tuple[ToolSchema, ...]:
    """Schemas of all tools of an environment (its own and its toolsets') or of one toolset; see :func:`functions`."""
    return tuple(tool_schema(function, mark) for function, mark in functions(owner, toolsets).values())


def catalogue_hash(tools: Sequence[ToolSchema]) -> str:
    """Digest of what the model sees of ``tools``. Their order counts, because the prompt shows it."""
    return digest(*(msgspec.json.encode((t.name, t.description, t.parameters, t.ends)) for t in tools))


def call_arguments(function: Function, arguments_json: str | bytes) -> dict[str, Any]:
    """Keyword arguments for ``function`` from the JSON text of a call; parameters left out keep their defaults.

    Only lossless conversions are made: an integer for a ``float``, ``3.0`` for an ``int``, nothing from or to text.
    Raises :class:`ToolError` whose sentence the model can act on.
    """
    struct = _arguments(_key(function)).struct
    text = encodable(arguments_json if isinstance(arguments_json, str) else arguments_json.decode("utf-8", "replace"))
    if too_deep(text):
        raise ToolError(f"The arguments do not fit: they nest deeper than {MAX_DEPTH} levels.")
    try:
        filled = _convert(struct, text)
    except msgspec.DecodeError as error:
        raise ToolError(f"The arguments do not fit: {_for_the_model(error)}.") from None
    return {name: value for name in struct.__struct_fields__ if (value := getattr(filled, name)) is not msgspec.UNSET}


def _convert(struct: type[msgspec.Struct], text: str) -> msgspec.Struct:
    try:
        return msgspec.json.decode(text, type=struct)
    except msgspec.ValidationError as error:
        try:  # JSON has one kind of number: 3.0 is a valid integer, which msgspec's strict mode refuses
            return msgspec.convert(msgspec.json.Decoder(float_hook=_number).decode(text), struct, str_keys=True)
        except msgspec.ValidationError:
            raise error from None


def _number(text: str) -> int | float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("Number out of range")
    return int(value) if value.is_integer() and abs(value) <= _EXACT_INTEGERS else value


def _for_the_model(error: Exception) -> str:
    return str(error).replace("`", "'").replace(" - at '$.", " at '")[:300]


class _Arguments(msgspec.Struct, frozen=True):
    """``struct`` decodes the arguments; a parameter with a default may be left out and then stays ``UNSET``."""

    struct: type[msgspec.Struct]
    types: dict[str, Any]
    defaults: dict[str, Any]


def _key(function: Function) -> Function:
    """The plain function under a bound method: one per class, where bound methods are one per slot."""
    return typing.cast(Function, getattr(function, "__func__", function))


@lru_cache(maxsize=4096)
def _arguments(function: Function) -> _Arguments:
    """Raises :class:`ConfigError` for parameters that a schema cannot express."""
    where = f"tool {function.__qualname__}"
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    hints = _hints(function, where)
    fields: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind not in _BY_NAME:
            raise ConfigError(f"{where}: {parameter} cannot be called by name; use plain or keyword-only parameters")
        if parameter.name not in hints:
            raise ConfigError(f"{where}: parameter {parameter.name!r} has no annotation; write {parameter.name}: str")
        fields[parameter.name] = hints[parameter.name]
        if parameter.default is not parameter.empty:
            defaults[parameter.name] = parameter.default
    return _Arguments(_struct(where, fields, defaults), fields, defaults)


def _hints(function: Function, where: str) -> dict[str, Any]:
    """Annotations of the parameters. The return type plays no part: it may be importable only to a type checker."""
    annotations = {n: a for n, a in inspect.get_annotations(function).items() if n != "return"}
    try:
        return typing.get_type_hints(
            types.SimpleNamespace(__annotations__=annotations), function.__globals__, include_extras=True
        )
    except NameError as error:
        raise ConfigError(
            f"{where}: an annotation cannot be resolved ({error}); import that type or define it at module level"
        ) from None


def _struct(where: str, fields: dict[str, Any], defaults: dict[str, Any]) -> type[msgspec.Struct]:
    definition = [
        (name, hint | msgspec.UnsetType, msgspec.UNSET) if name in defaults else (name, hint)
        for name, hint in fields.items()
    ]
    try:
        struct = msgspec.defstruct("Arguments", definition, kw_only=True, forbid_unknown_fields=True)
        msgspec.json.Decoder(struct)
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(f"{where}: {str(error).splitlines()[-1]}") from None
    return struct


def _parameters(arguments: _Arguments, notes: dict[str, str], name: str) -> dict[str, Any]:
    shown = [
        (field, Annotated[hint, msgspec.Meta(description=notes[field])] if field in notes else hint)
        for field, hint in arguments.types.items()
    ]
    struct = msgspec.defstruct("Arguments", shown, kw_only=True, forbid_unknown_fields=True)
    try:
        _, components = msgspec.json.schema_components([struct], ref_template="#/$defs/{name}")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"tool {name}: {str(error).splitlines()[-1]}; use a type that JSON can carry") from None
    schema = components.pop("Arguments")
    for field, default in arguments.defaults.items():
        _note_default(schema["properties"][field], default)
    schema["required"] = [field for field in arguments.types if field not in arguments.defaults]
    if components:
        schema["$defs"] = components
    return typing.cast("dict[str, Any]", _closed(schema))


def _note_default(schema: dict[str, Any], default: Any) -> None:
    try:
        schema["default"] = msgspec.to_builtins(default, str_keys=True)
    except (TypeError, ValueError, RecursionError):
        return  # a sentinel: the parameter may be left out, but no JSON says what it then is


def _closed(node: Any) -> Any:
    """The schema without titles (they cost prompt tokens) and with every object of known fields closed."""
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    out: dict[str, Any] = {}
    for key, value in node.items():
        if key in ("properties", "$defs"):
            out[key] = {name: _closed(child) for name, child in value.items()}
        elif key in ("default", "enum", "const", "description"):
            out[key] = value
        elif key != "title" and not (key == "required" and not value):
            out[key] = _closed(value)
    if "properties" in node:
        out.setdefault("additionalProperties", False)
    return out


def _own_toolsets(owner: Owner) -> list[Toolset | type[Toolset]]:
    """Toolset classes as they are; other factories are called, since only their product knows its tools."""
    factories: Iterable[Callable[[], Toolset]] = getattr(owner, "toolsets", ())
    return [factory if isinstance(factory, type) else factory() for factory in factories]
