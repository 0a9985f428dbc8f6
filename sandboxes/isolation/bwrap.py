"""The command line of bubblewrap: every namespace unshared, private /tmp, no network, no privileges, calls filtered.

A command sees either this machine's system, read-only and as much of it as a dynamically linked program and the running
Python need, or the files of an image as its root. Nothing is asked of an image: process 1 is bubblewrap's own, which
takes in orphans, and bounds are set from outside (:mod:`sandboxes.isolation.gate`). Source: bubblewrap's manual.
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
from sandboxes.isolation.files.workspace import WORKSPACE, Workspace
from sandboxes.isolation.probe import require_working
from sandboxes.isolation.seccomp import open_filter
from sandboxes.isolation.user import becoming, sandbox_user

_HELP_SECONDS = 10.0
_INSTALL = "install it with: apt-get install bubblewrap"
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime")
_IMAGE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ETC_NETWORK = ("hosts", "nsswitch.conf", "resolv.conf", "services", "ssl")
_OURS = {"/proc", "/dev", "/sys", "/tmp", WORKSPACE}  # noqa: S108 - inside
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
    calls = open_filter(memory_counted=True)
    argv = [
        *becoming(sandbox_user(0)),
        path,
        *_fixed(path),
        *system(network=False),
        "--proc",
        "/proc",
        "--dev",
        "/dev",
    ]
    argv += ["--seccomp", str(calls), "--", "/bin/sh", "-c", "exit 0"]
    needs = (
        "user namespaces: set sysctl kernel.unprivileged_userns_clone=1 and "
        "kernel.apparmor_restrict_unprivileged_userns=0, "
        "and in a container allow CAP_SYS_ADMIN or an unconfined seccomp profile"
    )
    try:
        require_working(path, argv, status=0, needs=needs, install=_INSTALL, fds=[calls])
    finally:
        os.close(calls)
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
    """``argv`` wrapped: what to start on the host, as ``user`` when given; ``gate``: options that hold it first."""
    path = require_bwrap()
    words = [*becoming(user), path, *gate, *_fixed(path), *(["--share-net"] if profile.network else [])]
    if workspace.root is None:
        words += system(network=profile.network)
    else:
        words += ["--bind", str(workspace.root), "/"] if workspace.layered else image_files(workspace.root)
    words += ["--proc", "/proc", "--dev", "/dev"]
    # No tmpfs of its own, which would have room for half of the machine's memory in empty files.
    words += ["--bind", str(workspace.shm), "/dev/shm", "--remount-ro", "/dev"]  # noqa: S108 - inside
    words += ["--remount-ro", "/proc"]  # nobody lowers their price for the kernel that looks for memory
    words += ["--bind", str(workspace.tmp), "/tmp"]  # noqa: S108 - inside
    if workspace.root is None:
        words += interpreter(*mounts.prefix(), user)  # after /tmp: it may lie in there
    words += ["--bind", str(workspace.path), WORKSPACE]
    if not workspace.layered:
        words += ["--remount-ro", "/"]
    words += ["--chdir", workspace.workdir]
    for name, value in {**environment(workspace), **(env or {})}.items():
        words += ["--setenv", name, value]
    return [*words, "--", *argv]


def environment(workspace: Workspace) -> dict[str, str]:
    """Variables that every command gets."""
    if workspace.root is not None:
        return {"PATH": _IMAGE_PATH, "LANG": "C.UTF-8", **workspace.env, "HOME": WORKSPACE, "TMPDIR": "/tmp"}  # noqa: S108 - inside
    return {
        "PATH": f"{Path(python()).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": WORKSPACE,
        "TMPDIR": "/tmp",  # noqa: S108 - inside
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
    }


def image_files(root: Path) -> list[str]:
    """An image's files, read-only. Entry by entry, since it may lack the folders that the rest is mounted on."""
    words: list[str] = []
    for entry in sorted(root.iterdir()):
        target = f"/{entry.name}"
        if target in _OURS:
            continue
        if entry.is_symlink():
            words += ["--symlink", os.readlink(entry), target]  # noqa: PTH115 - the text, not a path
        else:
            words += ["--ro-bind", str(entry), target]
    return words


@cache
def _features(path: str) -> str:
    shown = subprocess.run([path, "--help"], capture_output=True, timeout=_HELP_SECONDS, check=False)  # noqa: S603 - ours
    return (shown.stdout + shown.stderr).decode(errors="replace")


@cache
def _fixed(path: str) -> tuple[str, ...]:
    """What is the same for every command: namespaces, privileges, who one is inside."""
    words = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    words += ["--cap-drop", "ALL", "--clearenv"]
    words += ["--uid", str(_INNER_USER), "--gid", str(_INNER_USER), "--hostname", "sandbox"]
    # Where a container shows its sysctls read-only bubblewrap cannot set this one; the call filter forbids the same.
    if "--disable-userns" in _features(path) and not os.statvfs("/proc/sys").f_flag & os.ST_RDONLY:
        words.append("--disable-userns")
    return tuple(words)


@cache
def system(*, network: bool) -> tuple[str, ...]:
    """This machine's programs and libraries, read-only."""
    words = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        folder = Path("/", name)
        if folder.is_symlink():
            words += ["--symlink", os.readlink(folder), str(folder)]  # noqa: PTH115 - the text, not a path
        elif folder.is_dir():
            words += ["--ro-bind", str(folder), str(folder)]
    for name in (*_ETC, *(_ETC_NETWORK if network else ())):
        file = Path("/etc", name)
        if file.exists():
            words += ["--ro-bind", str(file), str(file)]
    return tuple(words)


@cache
def interpreter(source: Path, prefix: Path, user: int | None) -> tuple[str, ...]:
    """The files of the Python that runs, unless they are part of the system or out of the user's reach."""
    if prefix.is_relative_to("/usr"):
        return ()
    if user is not None and any(not folder.stat().st_mode & stat.S_IXOTH for folder in (source, *source.parents)):
        return ()
    return ("--ro-bind", str(source), str(prefix))
