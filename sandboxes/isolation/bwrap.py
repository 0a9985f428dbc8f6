"""The command line of bubblewrap: every namespace unshared, read-only system, private /tmp, no network, no privileges.

Sources: bubblewrap's manual; what is bound is what a dynamically linked program and the running Python need.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from envfarm.core.errors import IsolationError
from envfarm.core.sandbox import SandboxProfile

WORKSPACE = "/workspace"
_PROBE_SECONDS = 10.0
_INSTALL = "install it with: apt-get install bubblewrap"
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime")
_SUID = 65534


def python() -> str:
    """The interpreter inside the sandbox: the one that runs here, outside its virtual environment."""
    return str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")


@cache
def require_bwrap() -> str:
    """Path of a bubblewrap that works here. Raises :class:`IsolationError` that says what to install or allow."""
    path = shutil.which("bwrap")
    if path is None:
        raise IsolationError(f"model-written code runs only under bubblewrap, and bwrap is not on PATH; {_INSTALL}")
    argv = [path, *_fixed(path, network=False), "--", "/bin/sh", "-c", "exit 0"]
    try:
        probe = subprocess.run(argv, capture_output=True, timeout=_PROBE_SECONDS, check=False, stdin=subprocess.DEVNULL)  # noqa: S603
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
    argv: Sequence[str], *, workspace: Path, profile: SandboxProfile, env: Mapping[str, str] | None, before: str = ""
) -> list[str]:
    """``argv`` wrapped: what to start on the host. ``before`` is shell code to run first, inside.

    A shell is process 1 in there: it takes in orphans, and signals keep their meaning for ``argv``.
    """
    path = require_bwrap()
    words = [path, *_fixed(path, network=profile.network)]
    size = str(profile.disk_bytes)
    words += ["--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", "/dev/shm"]  # noqa: S108 - inside
    words += ["--bind", str(workspace), WORKSPACE, "--chdir", WORKSPACE]
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
    shown = subprocess.run([path, "--help"], capture_output=True, timeout=_PROBE_SECONDS, check=False)  # noqa: S603
    return (shown.stdout + shown.stderr).decode(errors="replace")


@cache
def _fixed(path: str, *, network: bool) -> tuple[str, ...]:
    """All but the workspace, sizes and variables."""
    # As process 1, so that bubblewrap itself waits for the end of the namespace: nothing of it outlives the command.
    words = ["--unshare-all", "--unshare-user", "--as-pid-1", "--die-with-parent", "--new-session"]
    words += ["--cap-drop", "ALL", "--clearenv"]
    words += ["--uid", str(_SUID), "--gid", str(_SUID), "--hostname", "sandbox"]
    if "--disable-userns" in _features(path):
        words.append("--disable-userns")
    if network:
        words += ["--share-net"]
    words += _system()
    words += ["--proc", "/proc", "--dev", "/dev"]
    return tuple(words)


def _system() -> list[str]:
    words = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]  # noqa: PTH115 - the text, not a path
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    for name in _ETC:
        path = Path("/etc", name)
        if path.exists():
            words += ["--ro-bind", str(path), str(path)]
    prefix = Path(sys.base_prefix).resolve()
    if not prefix.is_relative_to("/usr"):
        words += ["--ro-bind", str(prefix), str(prefix)]
        if str(prefix) != sys.base_prefix:
            words += ["--ro-bind", str(prefix), sys.base_prefix]
    return words
