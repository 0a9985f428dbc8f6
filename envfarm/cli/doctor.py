"""``envfarm doctor``: what this machine can do, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import psutil
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

State = Literal["yes", "no", "limited"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One ability of this machine. ``remedy`` says what to do when it is not there."""

    name: str
    state: State
    detail: str
    needed_for: str
    remedy: str = ""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """Say what this machine can do, what is missing and how to get it."""
    found = list(examine())
    console = Console()
    if as_json:
        console.print_json(json.dumps([msgspec.to_builtins(f) for f in found]))
        return
    table = Table(title="What this machine can do", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("", "ability", "found", "for", "remedy"):
        table.add_column(heading)
    marks = {"yes": "[green]✓[/]", "no": "[red]✗[/]", "limited": "[yellow]~[/]"}
    for finding in found:
        said = (finding.name, finding.detail, finding.needed_for, finding.remedy)
        table.add_row(marks[finding.state], *(escape(text) for text in said))  # 'envfarm[gguf]' is no markup
    console.print(table)


def examine() -> Iterator[Finding]:
    """Every finding, in the order in which people need them."""
    yield _machine()
    yield _disk()
    for name, extra, purpose in _PACKAGES:
        yield _package(name, extra, purpose)
    yield _accelerator()
    for check in (_bubblewrap, _seccomp, _namespaces, _cgroups, _overlay, _gvisor, _docker, _kubernetes):
        yield check()


_ALLOW_NAMESPACES = (
    "allow user namespaces: sysctl kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0"
)
_PACKAGES = (
    ("torch", "engine", "embedded engine, trainer"),
    ("transformers", "worker", "tokenizers, models"),
    ("renderers", "worker", "rollout workers"),
    ("reasoning_gym", "sandbox", "the reasoning_gym environment"),
    ("gguf", "gguf", "policies that come as GGUF (smollm2-135m)"),
)


def _machine() -> Finding:
    memory = psutil.virtual_memory().total / 2**30
    cores = len(os.sched_getaffinity(0))
    detail = (
        f"{cores} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    )
    enough = cores >= 2 and memory >= 4
    return Finding(
        name="machine",
        state="yes" if enough else "limited",
        detail=detail,
        needed_for="everything",
        remedy="" if enough else "the demo wants 2 cores and 4 GiB",
    )


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    return Finding(
        name="disk",
        state="yes" if free >= 1 else "limited",
        detail=f"{free:.1f} GiB free here",
        needed_for="trajectories, checkpoints",
        remedy="" if free >= 1 else "free some space, or use --out on another disk",
    )


def _package(module: str, extra: str, purpose: str) -> Finding:
    remedy = f"pip install 'envfarm[{extra}]'"
    if importlib.util.find_spec(module) is None:
        return Finding(name=module, state="no", detail="not installed", needed_for=purpose, remedy=remedy)
    version = importlib.metadata.version(module.replace("_", "-"))
    return Finding(name=module, state="yes", detail=version, needed_for=purpose)


def _accelerator() -> Finding:
    found = shutil.which("nvidia-smi")
    names = _output([found, "--query-gpu=name", "--format=csv,noheader"]) if found else None
    if names:
        return Finding(name="GPU", state="yes", detail=names.replace("\n", ", "), needed_for="models beyond the demo's")
    return Finding(
        name="GPU",
        state="limited",
        detail="none: torch runs on the CPU",
        needed_for="models beyond the demo's",
    )


def _bubblewrap() -> Finding:
    purpose = "code that a model wrote, on this machine"
    program = shutil.which("bwrap")
    if program is None:
        return _missing("bubblewrap", "not installed", purpose, "apt-get install bubblewrap")
    flags = ["--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc"]
    if _output([program, *flags, "true"]) is None:
        return _missing("bubblewrap", "installed, but cannot make namespaces here", purpose, _ALLOW_NAMESPACES)
    version = _output([program, "--version"]) or ""
    if "--json-status-fd" not in (_output([program, "--help"]) or ""):
        return _missing("bubblewrap", f"{version} is too old", purpose, "install 0.6 or later")
    return Finding(name="bubblewrap", state="yes", detail=version, needed_for=purpose)


def _seccomp() -> Finding:
    purpose = "a filter on the system calls of that code"
    status = Path("/proc/self/status")
    if status.exists() and "Seccomp:" in status.read_text():
        return Finding(name="seccomp", state="yes", detail="the kernel filters calls", needed_for=purpose)
    return _missing("seccomp", "the kernel has no filters", purpose, "use a kernel with CONFIG_SECCOMP_FILTER")


def _namespaces() -> Finding:
    purpose = "bubblewrap, gVisor"
    program = shutil.which("unshare")
    if program is None:
        return _missing("user namespaces", "no unshare to try it with", purpose, "apt-get install util-linux")
    if _output([program, "--user", "--map-root-user", "true"]) is None:
        return _missing("user namespaces", "not allowed", purpose, _ALLOW_NAMESPACES)
    return Finding(name="user namespaces", state="yes", detail="allowed", needed_for=purpose)


def _cgroups() -> Finding:
    purpose = "bounds for a command as a whole"
    root = Path("/sys/fs/cgroup")
    version = 2 if (root / "cgroup.controllers").exists() else 1
    there = [name for name in ("memory", "pids", "cpu") if _may_group(root, version, name)]
    if len(there) == 3:
        return Finding(name="control groups", state="yes", detail=f"version {version}", needed_for=purpose)
    return Finding(
        name="control groups",
        state="limited",
        detail=f"version {version}; may make groups for: {', '.join(there) or 'nothing'}",
        needed_for=purpose,
        remedy="run hosts as root, or delegate a group (systemd: Delegate=yes); until then processes are watched",
    )


def _may_group(root: Path, version: int, control: str) -> bool:
    """Whether this process may make a group for ``control`` below its own; nothing is made."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if version == 2 and not names:
            own = root / path.lstrip("/")
            return os.access(own, os.W_OK) and control in (own / "cgroup.controllers").read_text().split()
        if control in names.split(","):
            mount = root / control
            own = mount / path.lstrip("/")
            return os.access(own if own.is_dir() else mount, os.W_OK)
    return False


def _overlay() -> Finding:
    purpose = "images whose files commands may change"
    program = shutil.which("unshare")
    script = (
        "mount -t tmpfs x /mnt && mkdir /mnt/l /mnt/u /mnt/w /mnt/m && "
        "mount -t overlay x -o userxattr,lowerdir=/mnt/l,upperdir=/mnt/u,workdir=/mnt/w /mnt/m"
    )
    if program and _output([program, "--user", "--map-root-user", "--mount", "sh", "-c", script]) is not None:
        return Finding(name="overlay", state="yes", detail="in a user namespace", needed_for=purpose)
    return Finding(
        name="overlay",
        state="limited",
        detail="not in a user namespace",
        needed_for=purpose,
        remedy="use Linux 5.11 or later; until then commands see an image read-only",
    )


def _gvisor() -> Finding:
    purpose = "isolation: gvisor"
    program = shutil.which("runsc")
    if program is None:
        return _missing("gVisor", "no runsc", purpose, "apt-get install runsc, or see gvisor.dev")
    detail = "".join((_output([program, "--version"]) or "").splitlines()[0:1])
    return Finding(name="gVisor", state="yes", detail=detail, needed_for=purpose)


def _docker() -> Finding:
    purpose = "the docker backend, compose"
    program = shutil.which("docker")
    if program is None:
        return _missing("Docker", "not installed", purpose, "apt-get install docker.io, then start dockerd")
    said = _output([program, "info", "--format", "{{json .}}"])
    facts = json.loads(said) if said else {}
    if not facts.get("ServerVersion"):
        why = "; ".join(facts.get("ServerErrors") or []) or "no engine answers"
        url = os.environ.get("DOCKER_HOST")
        remedy = (
            f"mend or unset DOCKER_HOST ({url})"
            if url
            else "start dockerd, or join the group docker, or set DOCKER_HOST"
        )
        return _missing("Docker", why, purpose, remedy)
    runtimes = ", ".join(sorted(name for name in facts.get("Runtimes", {}) if not name.startswith("io.")))
    if importlib.util.find_spec("docker") is None:
        return Finding(
            name="Docker",
            state="limited",
            detail=f"{facts['ServerVersion']}, but no Python package docker",
            needed_for=purpose,
            remedy="for the docker backend: pip install 'envfarm[docker]'",
        )
    detail = f"{facts['ServerVersion']}, cgroup {facts.get('CgroupVersion', '?')}, runtimes: {runtimes}"
    return Finding(name="Docker", state="yes", detail=detail, needed_for=purpose)


def _kubernetes() -> Finding:
    config = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    there = Path(config).exists()
    return Finding(
        name="Kubernetes",
        state="yes" if there else "no",
        detail=config if there else "no kubeconfig",
        needed_for="the chart",
        remedy="" if there else "set KUBECONFIG",
    )


def _missing(name: str, detail: str, purpose: str, remedy: str) -> Finding:
    return Finding(name=name, state="no", detail=detail, needed_for=purpose, remedy=remedy)


def _output(argv: list[str]) -> str | None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603 - fixed words
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
