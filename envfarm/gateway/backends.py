"""What makes hosts, by its registered name, with the options that its own factory takes."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from envfarm.core import plugins
from envfarm.core.errors import ConfigError
from envfarm.core.sandbox import Backend
from envfarm.core.suggestions import did_you_mean

GIVEN = ("environments", "slots", "max_hosts")  # by the gateway itself


def make_backend(
    name: str, state: Path, *, environments: Sequence[str], slots: int, hosts: int, options: Sequence[str] = ()
) -> Backend:
    """The backend registered as ``name``, for ``hosts`` hosts in each pool.

    ``options`` are words ``key=value``: keyword arguments of its factory, read as their annotations say. Raises
    :class:`ConfigError` that names what is wrong and lists what there is.
    """
    make: Callable[..., Backend] = plugins.load("envfarm.backends", name)
    keywords = _keywords(name, make, options)
    most = hosts * (1 + len(environments))  # each environment may name an image, and so need a pool, of its own
    return make(state, environments=environments, slots=slots, max_hosts=most, **keywords)


def _keywords(backend: str, make: Callable[..., Any], words: Sequence[str]) -> dict[str, Any]:
    there = _options(make)
    given: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or key not in there:
            problem = f"no option {key!r}{did_you_mean(key, there)}" if equals else f"{word!r} is not KEY=VALUE"
            raise ConfigError(f"--backend-option of {backend!r}: {problem} (there is: {_listed(there)})")
        given[key] = _value(backend, key, text, there[key])
    return given


def _options(make: Callable[..., Any]) -> dict[str, Any]:
    """Annotation of every keyword that a person may give."""
    parameters = inspect.signature(make).parameters.values()
    hints = typing.get_type_hints(inspect.getattr_static(make, "__init__") if isinstance(make, type) else make)
    return {p.name: hints.get(p.name, str) for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in GIVEN}


def _value(backend: str, key: str, text: str, kind: Any) -> Any:
    if isinstance(kind, types.UnionType) and str in typing.get_args(kind):
        return text  # it reads text itself
    try:
        return msgspec.convert(_plain(text, kind), kind, strict=False, dec_hook=lambda cls, value: cls(value))
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        said = str(error).replace("`", "")
        raise ConfigError(
            f"--backend-option {key}={text!r} of {backend!r}: expected {_described(kind)}: {said}"
        ) from error


def _plain(text: str, kind: Any) -> Any:
    """What JSON would hold: a list for a sequence, else the text."""
    kinds = [typing.get_origin(k) or k for k in (*typing.get_args(kind), kind)]
    if any(isinstance(k, type) and issubclass(k, Sequence) and not issubclass(k, str | bytes) for k in kinds):
        return [part for part in text.split(",") if part]
    return text


def _listed(there: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} ({_described(kind)})" for name, kind in sorted(there.items())) or "none"


def _described(kind: Any) -> str:
    if isinstance(kind, type) and not typing.get_args(kind):
        return {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}.get(
            kind.__name__, kind.__name__
        )
    return str(kind).replace("typing.", "").replace("collections.abc.", "").replace("pathlib.", "")
