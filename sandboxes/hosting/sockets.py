"""Where a host's socket lies: in the state folder, or in a short folder where that path would be too long."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

SOCKET_BYTES = 107  # sun_path of unix(7), without the closing zero


def socket_path(usual: Path) -> tuple[Path, str]:
    """``usual`` if its path is short enough, else one in a new folder that only this user can enter.

    Returns the path and the folder made for it (else empty), which is the caller's to remove.
    """
    if len(os.fsencode(usual)) <= SOCKET_BYTES:
        return usual, ""
    folder = tempfile.mkdtemp(prefix="envfarm-", dir="/tmp")
    return Path(folder, usual.name if len(usual.name) < 32 else "sock"), folder
