"""The command line of gVisor: a kernel of its own, in user space, for every command, and bubblewrap around that.

runsc runs without root inside a bubblewrap that unshares everything, as the slot's user. So whoever breaks out of
gVisor's kernel stands in namespaces without a network and with nothing in reach but the slot's own files; the gate
holds runsc as it holds any command; and when the namespace ends, the sentry and the gofer have ended too. Bubblewrap
filters no system calls here, for runsc filters its own far more narrowly.

Commands see the files that they would see under bubblewrap. They are called root in there, without any capability.
Each has a kernel that starts with it and ends with it: 0.16 s on the machine where this was written. Keeping one and
running commands in it with ``runsc exec`` would take 0.024 s, but then what an earlier command left running can only be
found by asking that very kernel, so it is not done. Source: the OCI runtime specification; ``runsc flags``.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from envfarm.core.errors import IsolationError
from envfarm.core.sandbox import SandboxProfile
from sandboxes.isolation import bwrap, mounts
from sandboxes.isolation.files.workspace import WORKSPACE, Workspace
from sandboxes.isolation.limits import FIRST_TO_GO
from sandboxes.isolation.probe import require_working
from sandboxes.isolation.user import becoming, sandbox_user

_FILES = "/fs"  # where runsc finds what commands see as /
_TMP = "/tmp"  # noqa: S108 - inside
_SCRATCH_BYTES = 16 * 1024 * 1024
_ARGUMENT_BYTES = 100_000  # the kernel takes less than 131072 for one word
_OPEN_FILES = 256
_KERNEL_BYTES = 96 * 1024 * 1024  # what runsc and its kernel take themselves
_KERNEL_PIDS = 96  # their threads; and each process inside is two outside
_INSTALL = "install it with: apt-get install runsc, or from https://gvisor.dev/docs/user_guide/install"
# 128 is runsc's word for its own failure, which it logs as well; a command may use the number too.
_RUN = """mkdir /run/bundle /run/state && printf %s "$@" > /run/bundle/config.json || exit 126
{flags} run -bundle /run/bundle command
code=$?
if [ $code -eq 128 ] && [ -s /run/log ]; then
  read -r said < /run/log
  case $said in *"no such file"*) exit 127 ;; *) exit 126 ;; esac
fi
exit $code"""


@cache
def require_runsc() -> str:
    """Path of a runsc that works here. Raises :class:`IsolationError` that says what to install or allow."""
    found = shutil.which("runsc")
    if found is None:
        raise IsolationError(f"the profile asks for gvisor, and runsc is not on PATH; {_INSTALL}")
    path = str(Path(found).resolve())
    bwrap.require_bwrap()
    files = [*_below(bwrap.system(network=False)), "--dir", _FILES + WORKSPACE, "--dir", _FILES + _TMP]
    argv = _command(path, files, _spec(["/bin/sh", "-c", "exit 7"], {}, "/", SandboxProfile()), sandbox_user(0), ())
    needs = (
        "user namespaces and ptrace, so no seccomp profile or Yama setting may forbid these, "
        "and it does not run inside another gVisor"
    )
    require_working(path, argv, status=7, needs=needs, install=_INSTALL)
    return path


def command(
    argv: Sequence[str],
    *,
    workspace: Workspace,
    profile: SandboxProfile,
    env: Mapping[str, str] | None,
    user: int | None = None,
    gate: Sequence[str] = (),
) -> list[str]:
    """``argv`` wrapped, as :func:`bwrap.command` does it. ``gate``: its options without a filter.

    Raises :class:`IsolationError` for a profile that this level cannot serve.
    """
    if profile.network:
        raise IsolationError("gvisor has no network here; set the profile's network to False or its isolation to bwrap")
    path = require_runsc()
    root = workspace.root
    if root is None:
        files = [*_below(bwrap.system(network=False))]
    else:
        files = ["--bind", str(root), _FILES] if workspace.layered else _below(bwrap.image_files(root))
    if not workspace.layered:
        files += [word for name in ("/dev", "/proc", "/sys") for word in ("--dir", _FILES + name)]
    files += ["--bind", str(workspace.tmp), _FILES + _TMP]
    if root is None:
        files += _below(bwrap.interpreter(*mounts.prefix(), user))
    files += ["--bind", str(workspace.path), _FILES + WORKSPACE]
    variables = {**bwrap.environment(workspace), **(env or {})}
    spec = _spec(argv, variables, workspace.workdir, profile, writable=workspace.layered)
    return _command(path, files, spec, user, gate, shared=workspace.layered)


def with_kernel(profile: SandboxProfile) -> SandboxProfile:
    """What the machine must let a command of ``profile`` have: its own bounds, and room for its kernel."""
    return msgspec.structs.replace(
        profile, memory_bytes=profile.memory_bytes + _KERNEL_BYTES, pids=2 * profile.pids + _KERNEL_PIDS
    )


def bounds(seconds: float, cpus: float) -> str:
    """Shell code to run before ``exec``: what bounds the kernel itself. A command's own limits are in its spec."""
    return f"{FIRST_TO_GO}ulimit -c 0 && ulimit -t {math.ceil(seconds * max(1.0, cpus)) + 1} && "


def _command(
    path: str, files: Sequence[str], spec: str, user: int | None, gate: Sequence[str], *, shared: bool = False
) -> list[str]:
    words = [*becoming(user), bwrap.require_bwrap(), *gate]
    words += ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv"]
    words += ["--uid", "0", "--gid", "0", "--cap-add", "ALL", "--hostname", "sandbox"]
    words += [*bwrap.system(network=False), "--proc", "/proc", "--dev", "/dev"]
    words += ["--size", str(_SCRATCH_BYTES), "--tmpfs", "/run", "--dir", _TMP, "--ro-bind", path, "/run/runsc", *files]
    words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--setenv", "PATH", "/usr/bin:/bin"]
    flags = ["/run/runsc", "--rootless", "--root", "/run/state", "--log", "/run/log", "--log-format", "json"]
    flags += ["--network", "none", "--ignore-cgroups", "--file-access", "shared" if shared else "exclusive"]
    parts = [spec[start : start + _ARGUMENT_BYTES] for start in range(0, len(spec), _ARGUMENT_BYTES)]
    return [*words, "--", "/bin/sh", "-c", _RUN.format(flags=" ".join(flags)), "sh", *parts]


def _spec(
    argv: Sequence[str], env: Mapping[str, str], workdir: str, profile: SandboxProfile, *, writable: bool = False
) -> str:
    """The container's configuration, in ASCII so that it can be cut anywhere."""
    shm = ["mode=1777", f"size={profile.disk_bytes}", "nosuid", "nodev"]
    spec = {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "root": {"path": _FILES, "readonly": not writable},
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": list(argv),
            "env": [f"{name}={value}" for name, value in env.items()],
            "cwd": workdir,
            "capabilities": {},
            "noNewPrivileges": True,
            "rlimits": _rlimits(profile),
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "tmpfs", "options": shm},  # noqa: S108 - inside
            _bind(_TMP),
            _bind(WORKSPACE),
        ],
        "linux": {"namespaces": [{"type": name} for name in ("pid", "network", "ipc", "uts", "mount")]},
    }
    return json.dumps(spec)


def _bind(folder: str) -> dict[str, Any]:
    return {"destination": folder, "type": "bind", "source": _FILES + folder, "options": ["rw", "nosuid", "nodev"]}


def _rlimits(profile: SandboxProfile) -> list[dict[str, Any]]:
    limits = (
        ("RLIMIT_CORE", 0),
        ("RLIMIT_NOFILE", _OPEN_FILES),
        ("RLIMIT_FSIZE", profile.disk_bytes),
        ("RLIMIT_DATA", profile.memory_bytes),
        ("RLIMIT_AS", 8 * profile.memory_bytes),
    )
    return [{"type": name, "soft": value, "hard": value} for name, value in limits]


def _below(words: Sequence[str]) -> list[str]:
    """Bubblewrap's words of the shape ``--option source target``, for targets under what will be the root."""
    return [_FILES + word if number % 3 == 2 else word for number, word in enumerate(words)]
