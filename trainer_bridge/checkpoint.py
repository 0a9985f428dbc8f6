"""Checkpoints: sharded model and optimiser (torch.distributed.checkpoint) beside the trainer's own place.

A checkpoint is a folder ``step-000123`` with DCP's files and ``trainer.json``. The folder gets its name only when all
of it is on disk, so a folder with that name is whole: there is no other marker. Place and weights are written
together, which is what makes a resumed trainer train each trajectory at most once in its lineage.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from envfarm.core.errors import ConfigError
from trainer_bridge.durable import draft_of, settle

_STATE = "trainer.json"
_PREFIX = "step-"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a trainer stands. ``position``: last group of the log that is done with; counters are cumulative."""

    run_id: str
    steps: int = 0
    version: int = 0
    position: int = 0
    trained: int = 0
    dropped: int = 0


def write_shards(model: nn.Module, optimiser: Optimizer, folder: Path) -> None:
    """Write this rank's shards of model and optimiser. Collective."""
    weights, moments = get_state_dict(model, optimiser)
    with _quiet():
        save({"model": weights, "optimiser": moments}, checkpoint_id=folder, no_dist=not dist.is_initialized())


def read_shards(model: nn.Module, optimiser: Optimizer, folder: Path) -> None:
    """Load model and optimiser, resharded to the present ranks. Collective."""
    weights, moments = get_state_dict(model, optimiser)
    with _quiet():
        load({"model": weights, "optimiser": moments}, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_state_dict(model, optimiser, model_state_dict=weights, optim_state_dict=moments)


def begin(root: Path, place: Place) -> Path:
    """An empty folder for the shards of a new checkpoint; it counts for nothing until :func:`finish`."""
    draft = draft_of(_folder(root, place))
    draft.mkdir(parents=True)
    return draft


def finish(root: Path, draft: Path, place: Place, *, keep: int) -> Path:
    """Add the trainer's place, sync, give the folder its name, remove all but the ``keep`` newest."""
    (draft / _STATE).write_bytes(msgspec.json.encode(place))
    final = _folder(root, place)
    settle(draft, final)
    for old in whole(root)[: -max(1, keep)]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def whole(root: Path) -> list[Path]:
    """Whole checkpoints under ``root``, oldest first."""
    return sorted(p for p in root.glob(f"{_PREFIX}*") if (p / _STATE).is_file())


def latest(root: Path, run_id: str) -> tuple[Path, Place] | None:
    """The newest whole checkpoint and its place. Raises ``ConfigError`` when it belongs to another run."""
    folders = whole(root)
    if not folders:
        return None
    place = msgspec.json.decode((folders[-1] / _STATE).read_bytes(), type=Place)
    if place.run_id != run_id:
        raise ConfigError(
            f"{folders[-1]} is a checkpoint of run {place.run_id}, not of {run_id}; give that run, or another --out"
        )
    return folders[-1], place


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns whenever there is no process group, also when it was told that there is none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _folder(root: Path, place: Place) -> Path:
    return root / f"{_PREFIX}{place.steps:06d}"
