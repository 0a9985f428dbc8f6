"""Parts found by entry point, so that ``envfarm`` imports none of the packages above it.

Groups: ``envfarm.environments`` (class), ``envfarm.rewards`` (RewardPart), ``envfarm.backends`` (factory),
``envfarm.commands`` (typer app or function). A third party adds to them in its own package metadata.
An environment may also be named ``module:Class`` or ``path/to/file.py:Class``; a registered one that takes a
parameter is named ``NAME/parameter``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from envfarm.core.environment import Environment
from envfarm.core.errors import ConfigError
from envfarm.core.suggestions import did_you_mean


@cache
def _group(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def names(group: str) -> list[str]:
    """Names registered under ``group``, sorted."""
    return sorted(_group(group))


def load(group: str, name: str) -> Any:
    """The object registered as ``name``. Raises :class:`ConfigError` that lists what there is."""
    point = _group(group).get(name)
    if point is None:
        kind = group.removeprefix("envfarm.").removesuffix("s")
        hint = did_you_mean(name, _group(group))
        raise ConfigError(f"no {kind} named {name!r}{hint} (there is: {', '.join(names(group)) or 'none'})")
    try:
        return point.load()
    except ModuleNotFoundError as error:
        kind = group.removeprefix("envfarm.").removesuffix("s")
        raise ConfigError(f"the {kind} {name!r} cannot be imported: {error}; {_remedy(point)}") from error


def _remedy(point: EntryPoint) -> str:
    """What to install for ``point``: the extra of its distribution that has its name, if there is one."""
    if point.dist is None:
        return "install what it needs"
    package = point.dist.name
    if point.name in (point.dist.metadata.get_all("Provides-Extra") or []):
        return f"install what it needs: pip install '{package}[{point.name}]'"
    return f"install what it needs (it comes with {package})"


def load_all(group: str) -> dict[str, Any]:
    """Every object of ``group`` by name."""
    return {name: load(group, name) for name in names(group)}


def environment(name: str) -> type[Environment]:
    """An environment class by registered name, ``name/parameter``, ``module:Class`` or ``file.py:Class``."""
    if ":" not in name:
        registered, slash, parameter = name.partition("/")
        found = load("envfarm.environments", registered)
        if slash and isinstance(found, type) and issubclass(found, Environment):
            found = found.configured(parameter)
    else:
        source, _, attribute = name.rpartition(":")
        found = getattr(_module(source), attribute, None)
        if found is None:
            raise ConfigError(f"{source} has no {attribute!r}; expected a subclass of envfarm.Environment")
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ConfigError(f"{name!r} is not a subclass of envfarm.Environment")
    return found


def _module(source: str) -> Any:
    if not source.endswith(".py"):
        try:
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise ConfigError(f"cannot import {source!r}: {error}; is it installed here?") from error
    path = Path(source).resolve()
    if not path.is_file():
        raise ConfigError(f"no file {path}")
    module_name = f"envfarm_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module
