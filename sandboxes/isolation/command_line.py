"""The command line of an isolated command: a shell that takes the bounds upon itself and becomes what confines it.

Cheaper than to fork this process and bound its child from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envfarm.core.sandbox import Isolation, SandboxProfile
from sandboxes.isolation import bwrap
from sandboxes.isolation.gate import Gate
from sandboxes.isolation.workspace import Workspace

EPISODE_SECONDS = 86_400.0  # of processor time for what goes on between calls; its episode's end bounds it


def command_line(
    argv: Sequence[str],
    *,
    workspace: Workspace,
    profile: SandboxProfile,
    controls: frozenset[str],
    env: Mapping[str, str] | None = None,
    user: int | None = None,
    seconds: float = EPISODE_SECONDS,
    gate: Gate | None = None,
) -> list[str]:
    """What to start on the host. ``controls``: what control groups bound already; the rest falls to rlimits."""
    if profile.isolation is Isolation.NONE:
        inner = ["/usr/bin/env", *(f"{k}={v}" for k, v in (env or {}).items()), *argv]
    else:
        inner = bwrap.command(
            argv,
            workspace=workspace,
            profile=profile,
            env=env,
            user=user,
            before=_bounds_inside(profile, controls),
            gate=gate.words if gate is not None else (),
        )
    return ["/bin/sh", "-c", _bounds(profile, controls, seconds) + 'exec "$@"', "sh", *inner]


def _bounds_inside(profile: SandboxProfile, controls: frozenset[str]) -> str:
    if "pids" in controls:
        return ""
    # Inside the user namespace, where the kernel counts only the sandbox's own processes.
    return f"ulimit -p {profile.pids} 2>/dev/null || ulimit -u {profile.pids}; "


def _bounds(profile: SandboxProfile, controls: frozenset[str], seconds: float) -> str:
    memory = profile.memory_bytes // 1024
    lines = [
        "ulimit -c 0",
        "ulimit -n 256",
        f"ulimit -t {int(seconds * max(1.0, profile.cpus)) + 1}",
        f"ulimit -f {max(1, profile.disk_bytes // 512)}",
        f"ulimit -d {memory}",
    ]
    if "memory" not in controls:
        lines.append(f"ulimit -v {memory}")
    return " && ".join(lines) + " && "
