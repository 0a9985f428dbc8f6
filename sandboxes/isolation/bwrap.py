"""The command line of bubblewrap: every namespace unshared, read-only system, private /tmp, no network, no privileges.

Sources: bubblewrap's manual; what is bound is what a dynamically linked program and the running Python need.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from envfarm.core.errors import IsolationError
from envfarm.core.sandbox import SandboxProfile
from sandboxes.isolation import mounts
from sandboxes.isolation.user import becoming, sandbox_user
from sandboxes.isolation.workspace import Workspace

WORKSPACE = "/workspace"
_PROBE_SECONDS = 10.0
_INSTALL = "install it with: apt-get install bubblewrap"
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime")
_INNER_USER = 65534


def python() -> str:
    """The interpreter inside the sandbox: the one that runs here, outside its virtual environment."""
    return str(mounts.prefix()[1] / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")


@cache
def require_bwrap() -> str:
    """Path of a bubblewrap that works here. Raises :class:`IsolationError` that says what to install or allow."""
    path = shutil.which("bwrap")
    if path is None:
        raise IsolationError(f"model-written code runs only under bubblewrap, and bwrap is not on PATH; {_INSTALL}")
    argv = [*becoming(sandbox_user(0)), path, *_fixed(path, network=False), "--", "/bin/sh", "-c", "exit 0"]
    try:
        probe = subprocess.run(argv, capture_output=True, timeout=_PROBE_SECONDS, check=False, stdin=subprocess.DEVNULL)  # noqa: S603 - ours
    except (OSError, subprocess.TimeoutExpired) as error:
        raise IsolationError(f"{path} does not work here: {error}; {_INSTALL}") from error
    if probe.returncode != 0:
        said = probe.stderr.decode(errors="replace").strip() or f"status {probe.returncode}"
        raise IsolationError(
            f"{path} does not work here ({said}); it needs user namespaces: "
            "set sysctl kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0, "
            "and in a container allow CAP_SYS_ADMIN or an unconfined seccomp profile"
        )
    return path


def command(
    argv: Sequence[str],
    *,
    workspace: Workspace,
    profile: SandboxProfile,
    env: Mapping[str, str] | None,
    user: int | None = None,
    before: str = "",
    gate: Sequence[str] = (),
) -> list[str]:
    """``argv`` wrapped: what to start on the host, as ``user`` when given. ``before``: shell code to run first, inside.

    A shell is process 1 in there: it takes in orphans, and signals keep their meaning for ``argv``.
    """
    path = require_bwrap()
    words = [*becoming(user), path, *gate, *_fixed(path, network=profile.network)]
    size = str(profile.disk_bytes)
    words += ["--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", "/dev/shm"]  # noqa: S108 - inside
    words += _interpreter(*mounts.prefix(), user)  # after /tmp: it may lie in there
    words += ["--bind", str(workspace.path), WORKSPACE, "--chdir", WORKSPACE]
    words += ["--remount-ro", "/dev", "--remount-ro", "/"]
    for name, value in {**_environment(), **(env or {})}.items():
        words += ["--setenv", name, value]
    return [*words, "--", "/bin/sh", "-c", f'{before}"$@"; exit $?', "sh", *argv]


def _environment() -> dict[str, str]:
    return {
        "PATH": f"{Path(python()).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": WORKSPACE,
        "TMPDIR": "/tmp",  # noqa: S108 - inside
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
    }


@cache
def _features(path: str) -> str:
    shown = subprocess.run([path, "--help"], capture_output=True, timeout=_PROBE_SECONDS, check=False)  # noqa: S603 - ours
    return (shown.stdout + shown.stderr).decode(errors="replace")


@cache
def _fixed(path: str, *, network: bool) -> tuple[str, ...]:
    """All but the interpreter, the workspace, sizes and variables."""
    # As process 1, so that bubblewrap itself waits for the end of the namespace: nothing of it outlives the command.
    words = ["--unshare-all", "--unshare-user", "--as-pid-1", "--die-with-parent", "--new-session"]
    words += ["--cap-drop", "ALL", "--clearenv"]
    words += ["--uid", str(_INNER_USER), "--gid", str(_INNER_USER), "--hostname", "sandbox"]
    if "--disable-userns" in _features(path):
        words.append("--disable-userns")
    if network:
        words += ["--share-net"]
    words += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        folder = Path("/", name)
        if folder.is_symlink():
            words += ["--symlink", os.readlink(folder), str(folder)]  # noqa: PTH115 - the text, not a path
        elif folder.is_dir():
            words += ["--ro-bind", str(folder), str(folder)]
    for name in _ETC:
        file = Path("/etc", name)
        if file.exists():
            words += ["--ro-bind", str(file), str(file)]
    return (*words, "--proc", "/proc", "--dev", "/dev")


@cache
def _interpreter(source: Path, prefix: Path, user: int | None) -> tuple[str, ...]:
    """The files of the Python that runs, unless they are part of the system or out of the user's reach."""
    if prefix.is_relative_to("/usr"):
        return ()
    if user is not None and any(not folder.stat().st_mode & stat.S_IXOTH for folder in (source, *source.parents)):
        return ()
    return ("--ro-bind", str(source), str(prefix))
