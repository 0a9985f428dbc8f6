"""Memory of all processes of a command together, for hosts that have no control group to bound it.

Looked at now and then, so it bounds what stays and not what comes and goes between two looks. Shared pages count once:
proportional sizes are asked for (a walk over page tables) only when the cheap sum is above the bound.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def exceeds(pid: int, bound: int) -> bool:
    """Whether ``pid`` and its descendants hold more than ``bound`` bytes of memory. Blocking, a millisecond or so."""
    everyone = list(_family(pid))
    if sum(map(_resident, everyone)) <= bound:
        return False
    return sum(map(_proportional, everyone)) > bound


def _family(pid: int) -> Iterator[int]:
    waiting = [pid]
    while waiting:
        process = waiting.pop()
        yield process
        try:
            threads = os.listdir(f"/proc/{process}/task")  # noqa: PTH208 - names are enough
        except OSError:
            continue
        for thread in threads:
            waiting += map(int, _text(f"/proc/{process}/task/{thread}/children").split())


def _resident(pid: int) -> int:
    fields = _text(f"/proc/{pid}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def _proportional(pid: int) -> int:
    for line in _text(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return _resident(pid)  # not ours to look into, or just gone


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
