"""What to start on the host for one isolated command: a shell that bounds itself and becomes what confines it.

Cheaper than to fork this process and bound its child from here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from envfarm.core.errors import ToolError
from envfarm.core.sandbox import Isolation, SandboxProfile
from sandboxes.isolation import bwrap, gvisor
from sandboxes.isolation.files.workspace import Workspace
from sandboxes.isolation.gate import Gate
from sandboxes.isolation.limits import bound_processes_of_user, bounds

# Variables of what stands around a confined command. Not this process's own: process 1 inside keeps them in its memory,
# where the command can read them.
OUTSIDE = {"PATH": os.defpath, "LANG": "C.UTF-8"}
_WORD_BYTES, _WORDS_BYTES = 131_000, 1_000_000  # the kernel takes a little more: MAX_ARG_STRLEN, a quarter of the stack
EPISODE_SECONDS = 86_400.0  # of processor time for what goes on between calls; its episode's end bounds it


def require_words(argv: Sequence[str], env: Mapping[str, str] | None) -> None:
    """Raises :class:`ToolError` for what no kernel starts as a command: models write such things."""
    if not argv:
        raise ToolError("error: no command is given")
    total = 0
    for word in (*argv, *(f"{name}={value}" for name, value in (env or {}).items())):
        try:
            size = len(os.fsencode(word))
        except UnicodeEncodeError:
            raise ToolError("error: the command is not text: it has half of a surrogate pair in it") from None
        if "\0" in word:
            raise ToolError("error: the command has a null character in it")
        total += size
        if size > _WORD_BYTES or total > _WORDS_BYTES:
            raise ToolError(f"error: the command is too long; write what is longer than {_WORD_BYTES} bytes to a file")


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
    """``argv`` confined as the profile asks. ``controls``: what control groups bound; ``gate``: holds it first."""
    if profile.isolation is Isolation.GVISOR:
        before = gvisor.bounds(seconds, profile.cpus)
        hold = gate.unfiltered if gate is not None else ()
        inner = gvisor.command(argv, workspace=workspace, profile=profile, env=env, user=user, gate=hold)
        if user is not None and "pids" not in controls:
            before += bound_processes_of_user(gvisor.with_kernel(profile).pids)
        return ["/bin/sh", "-c", f'{before}exec "$@"', "sh", *inner]
    before = bounds(profile, seconds)
    if profile.isolation is Isolation.NONE:
        inner = ["/usr/bin/env", *(f"{k}={v}" for k, v in (env or {}).items()), *argv]
    else:
        inner = bwrap.command(
            argv,
            workspace=workspace,
            profile=profile,
            env=env,
            user=user,
            gate=gate.words if gate is not None else (),
        )
        if user is not None and "pids" not in controls:
            before += bound_processes_of_user(profile.pids)
    return ["/bin/sh", "-c", f'{before}exec "$@"', "sh", *inner]
