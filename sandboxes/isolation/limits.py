"""Resource limits of one command: shell code that a process takes upon itself before it becomes the command.

Outside, so that nothing is asked of the files that the command sees, and by itself, since another process may bound it
only with CAP_SYS_RESOURCE or as the same user. They hold for each process; what control groups bound for all processes
together is left to them.
"""

from __future__ import annotations

import math
import resource

from envfarm.core.sandbox import SandboxProfile

_OPEN_FILES = 256
# The kernel takes what says 1000 before anything else when memory runs out. Root's word on it cannot be taken back.
FIRST_TO_GO = "{ echo 1000 > /proc/self/oom_score_adj; } 2>/dev/null; "


def bounds(profile: SandboxProfile, seconds: float) -> str:
    """Shell code to run before ``exec``. ``seconds``: wall time that the command has."""
    limits = (
        ("c", 0),
        ("n", _OPEN_FILES),
        ("t", math.ceil(seconds * max(1.0, profile.cpus)) + 1),
        ("f", max(1, profile.disk_bytes // 512)),
        ("d", profile.memory_bytes // 1024),
    )
    return FIRST_TO_GO + "".join(f"ulimit -{option} {value} && " for option, value in limits)


def bound_processes_of_user(count: int) -> str:
    """Shell code, before one becomes a user of whom nothing else runs: at most ``count`` processes of theirs."""
    return f"{{ ulimit -p {count} 2>/dev/null || ulimit -u {count}; }} && "  # dash and bash differ


def bound_processes_below(pid: int, count: int) -> None:
    """At most ``count`` processes in the user namespace of a process of our own user. Raises ``OSError``."""
    resource.prlimit(pid, resource.RLIMIT_NPROC, (count, count))
