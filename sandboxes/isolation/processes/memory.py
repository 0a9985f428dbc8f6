"""Memory of all processes of a command together, for hosts that have no control group to bound it.

Looked at now and then, so it bounds what stays and not what comes and goes between two looks. Shared pages count once:
proportional sizes are asked for (a walk over page tables) only when the cheap sum is above the bound. What the kernel
holds for processes counts as far as it can be seen: their page tables, and what is on its way in their sockets (of Unix
sockets the kernel tells only their number, so each counts for what one may hold). Source: proc(5).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_UNIX_SOCKET_BYTES = 212_992  # net.core.wmem_default


def exceeds(pid: int, bound: int) -> bool:
    """Whether ``pid`` and its descendants hold more than ``bound`` bytes of memory. Blocking, a millisecond or so."""
    sockets = _sockets(pid)
    if sockets > bound:
        return True  # at once: who fills sockets leaves the looker little time
    everyone = list(_family(pid))
    if sockets + sum(map(_resident, everyone)) <= bound:
        return False
    return sockets + sum(map(_proportional, everyone)) > bound


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
    """Its pages and its page tables."""
    return _kilobytes(f"/proc/{pid}/status", "VmRSS:", "VmPTE:")


def _proportional(pid: int) -> int:
    pages = _kilobytes(f"/proc/{pid}/smaps_rollup", "Pss:")
    if pages:
        return pages + _kilobytes(f"/proc/{pid}/status", "VmPTE:")
    return _resident(pid)  # not ours to look into, or just gone


def _kilobytes(path: str, *keys: str) -> int:
    """Sum of the lines with these keys, in bytes."""
    return sum(int(line.split()[1]) * 1024 for line in _text(path).splitlines() if line.startswith(keys))


def _sockets(pid: int) -> int:
    """Bytes in the sockets of the network that ``pid`` is in; 0 when that is ours, where others have theirs."""
    try:
        ours, theirs = (os.stat(f"/proc/{who}/ns/net").st_ino for who in ("self", pid))  # noqa: PTH116 - cheaper
    except OSError:
        return 0
    net = f"/proc/{pid}/net"
    used = dict.fromkeys(("sockets", "TCP", "TCP6", "UDP", "UDP6"), 0)
    if ours != theirs:
        for line in _text(f"{net}/sockstat").splitlines() + _text(f"{net}/sockstat6").splitlines():
            kind, _, rest = line.partition(":")
            if kind in used:
                used[kind] = int(rest.split()[1])
    internet = sum(used.values()) - used["sockets"]
    total = max(0, used["sockets"] - internet) * _UNIX_SOCKET_BYTES
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        if used[kind.upper()]:  # else not read: that walks all buckets of the machine's table
            for line in _text(f"{net}/{kind}").splitlines()[1:]:
                sending, _, received = line.split()[4].partition(":")
                total += int(sending, 16) + int(received, 16)
    return total


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
