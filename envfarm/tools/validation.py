"""Whether a call fits the catalogue, and the sentence that tells the model what to mend when it does not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import jsonschema_rs
import msgspec

from envfarm.core.errors import ConfigError
from envfarm.core.messages import Diagnosis, ToolCall, ToolSchema
from envfarm.core.suggestions import nearest
from envfarm.tools.payload import MAX_DEPTH, excerpt, json_fault, too_deep

MAX_ARGUMENT_CHARACTERS = 1 << 20
MAX_DETAIL = 400
_NAMES_SHOWN = 8
_KINDS = {"string": "a string", "integer": "an integer", "number": "a number", "boolean": "true or false"}
_KINDS |= {"array": "an array", "object": "an object", "null": "null"}
_BOUNDS = {
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMinimum": "more than",
    "exclusiveMaximum": "less than",
    "multipleOf": "a multiple of",
    "pattern": "text that matches",
    "format": "text of the format",
    "const": "exactly",
}
_SIZES = {
    "minLength": ("at least", "characters"),
    "maxLength": ("at most", "characters"),
    "minItems": ("at least", "items"),
    "maxItems": ("at most", "items"),
    "minProperties": ("at least", "fields"),
    "maxProperties": ("at most", "fields"),
}
# Patterns meet text from a model: this engine has no look-around and never backtracks.
_LINEAR_REGEX = jsonschema_rs.RegexOptions()
_decode = msgspec.json.Decoder().decode


class Verdict(msgspec.Struct, frozen=True):
    """``ok``, ``unknown_tool``, ``schema`` or ``syntax``; ``detail`` is one sentence of at most 400 characters."""

    diagnosis: Diagnosis
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the call may run."""
        return self.diagnosis is Diagnosis.OK


_FINE = Verdict(Diagnosis.OK)


class Catalogue:
    """The tools of one environment with their schemas compiled. Immutable; safe to share between threads."""

    def __init__(self, tools: Iterable[ToolSchema]) -> None:
        self.tools: dict[str, ToolSchema] = {}
        self._parameters: dict[str, dict[str, Any]] = {}
        self._validators: dict[str, jsonschema_rs.Draft202012Validator] = {}
        for tool in tools:
            if tool.name in self.tools:
                raise ConfigError(f"two tools of one catalogue are named {tool.name!r}; rename one")
            self.tools[tool.name] = tool
            self._parameters[tool.name], self._validators[tool.name] = _compiled(tool)

    def check(self, call: ToolCall) -> Verdict:
        """Grade one call. Never raises, whatever the call holds; the time is linear in its arguments."""
        validator = self._validators.get(call.name)
        if validator is None:
            return self._unknown(call.name)
        text = call.arguments
        if len(text) > MAX_ARGUMENT_CHARACTERS:
            reason = f"they are {len(text)} characters long, and {MAX_ARGUMENT_CHARACTERS} are allowed"
            return _syntax(call, reason)
        if too_deep(text):
            return _syntax(call, f"they nest deeper than {MAX_DEPTH} levels")
        try:
            arguments = _decode(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            return _syntax(call, f"they are not valid JSON: {json_fault(error, text)}")
        if not isinstance(arguments, dict):
            return _syntax(call, f"they must be a JSON object, got {excerpt(text)}")
        if validator.is_valid(arguments):
            return _FINE
        return Verdict(Diagnosis.SCHEMA, _bounded(f"{_shown(call.name)}: {self._misfit(call.name, arguments)}."))

    def _unknown(self, name: str) -> Verdict:
        close = nearest(name, self.tools)
        known = ", ".join(list(self.tools)[:_NAMES_SHOWN]) + (", ..." if len(self.tools) > _NAMES_SHOWN else "")
        hint = f"did you mean {close}?" if close else f"the tools are: {known}." if known else "there are no tools."
        return Verdict(Diagnosis.UNKNOWN_TOOL, _bounded(f"There is no tool named {_shown(name)}; {hint}"))

    def _misfit(self, name: str, arguments: dict[str, Any]) -> str:
        """The first misfit: path, expected, got. One at a time is what a model mends best."""
        try:
            self._validators[name].validate(arguments)
        except jsonschema_rs.ValidationError as error:
            return _sentence(error, self._parameters[name])
        return "the arguments do not fit"  # not reached: validate() agrees with is_valid()


def _refuse(uri: str) -> NoReturn:
    """No schema makes the farm open a connection."""
    raise ValueError(f"{uri} is outside the schema; put the definition under $defs")


def _compiled(tool: ToolSchema) -> tuple[dict[str, Any], jsonschema_rs.Draft202012Validator]:
    try:
        parameters = msgspec.json.decode(tool.parameters, type=dict[str, Any])
        return parameters, jsonschema_rs.Draft202012Validator(
            parameters, pattern_options=_LINEAR_REGEX, retriever=_refuse
        )
    except (msgspec.DecodeError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
        reason = _bounded(str(error).splitlines()[0])
        raise ConfigError(f"tool {tool.name!r}: its parameters are no JSON schema of an object: {reason}") from None


def _syntax(call: ToolCall, reason: str) -> Verdict:
    return Verdict(Diagnosis.SYNTAX, _bounded(f"The arguments of {_shown(call.name)} cannot be read: {reason}."))


def _sentence(error: jsonschema_rs.ValidationError, parameters: dict[str, Any]) -> str:
    path = _path(error.instance_path)
    kind = error.kind
    match kind:
        case jsonschema_rs.ValidationErrorKind.AdditionalProperties(unexpected=unexpected):
            return _unexpected(path, unexpected, _fields(error, parameters))
        case jsonschema_rs.ValidationErrorKind.Required(property=missing):
            return f"{path or 'the call'} lacks {_shown(missing)}"
        case _:
            return f"{path or 'the arguments'} must be {_expected(kind)}, got {_json(error.instance)}"


def _expected(kind: jsonschema_rs.ValidationErrorKind) -> str:
    match kind:
        case jsonschema_rs.ValidationErrorKind.Type(types=types):
            return _either(_KINDS.get(t, t) for t in types)
        case jsonschema_rs.ValidationErrorKind.Enum(options=options):
            return f"one of {', '.join(_json(o) for o in options[:_NAMES_SHOWN])}"
        case (
            jsonschema_rs.ValidationErrorKind.AnyOf(context=context)
            | jsonschema_rs.ValidationErrorKind.OneOfNotValid(context=context)
        ):
            return _either(_expected(branch[0].kind) for branch in context[:_NAMES_SHOWN] if branch)
        case jsonschema_rs.ValidationErrorKind.FalseSchema():
            return "left out"
    if kind.name in _SIZES:
        bound, unit = _SIZES[kind.name]
        return f"{bound} {kind.value} {unit}"
    if kind.name in _BOUNDS:
        return f"{_BOUNDS[kind.name]} {_json(kind.value)}"
    return f"a value that fits {_shown(kind.name)}"


def _unexpected(path: str, unexpected: list[str], known: list[str]) -> str:
    close = nearest(unexpected[0], known)
    hint = f"perhaps {close}" if close else f"only {', '.join(known[:_NAMES_SHOWN])}" if known else "no fields at all"
    return f"{path or 'the call'} has no field {_shown(unexpected[0])}, {hint}"


def _fields(error: jsonschema_rs.ValidationError, parameters: dict[str, Any]) -> list[str]:
    """Names that the object at fault may have: the ``properties`` beside the keyword that failed."""
    node: Any = parameters
    for key in error.schema_path[:-1]:
        try:
            node = node[key]
        except (KeyError, IndexError, TypeError):
            return []
    return list(node.get("properties", ())) if isinstance(node, dict) else []


def _path(parts: list[str | int]) -> str:
    out = ""
    for part in parts:
        out += f"[{part}]" if isinstance(part, int) else f".{_shown(part)}" if out else _shown(part)
    return out


def _shown(name: str) -> str:
    """A name for a sentence: as it is when plain and short, else quoted and cut."""
    return name if len(name) <= 64 and name.isidentifier() else excerpt(name)


def _json(value: Any) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        text = str(type(value).__name__)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _either(choices: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(choices))


def _bounded(text: str) -> str:
    return text if len(text) <= MAX_DETAIL else f"{text[: MAX_DETAIL - 3]}..."
