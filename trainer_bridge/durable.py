"""Folders that appear whole or not at all, and are on disk once they have their name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def draft_of(folder: Path) -> Path:
    """Where to make ``folder`` ready: a hidden path beside it at which nothing is. Leftovers of a crash are removed."""
    draft = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    return draft


def settle(draft: Path, folder: Path) -> None:
    """Sync everything in ``draft`` and give it its name, in place of an earlier attempt at the same folder."""
    for path in (*draft.rglob("*"), draft):
        _sync(path)
    if folder.exists():
        shutil.rmtree(folder)
    draft.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
