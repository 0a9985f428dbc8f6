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
        table.add_row(marks[finding.state], finding.name, finding.detail, finding.needed_for, finding.remedy)
    console.print(table)


def examine() -> Iterator[Finding]:
    """Every finding, in the order in which people need them."""
    yield _machine()
    yield _disk()
    for name, extra, purpose in _PACKAGES:
        yield _package(name, extra, purpose)
    yield _accelerator()
    for check in (_bubblewrap, _gvisor, _docker, _kubernetes):
        yield check()


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
        return Finding(
            name="bubblewrap",
            state="no",
            detail="not installed",
            needed_for=purpose,
            remedy="apt-get install bubblewrap",
        )
    tried = _output([program, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"])
    if tried is None:
        return Finding(
            name="bubblewrap",
            state="no",
            detail="installed, but cannot make namespaces here",
            needed_for=purpose,
            remedy="allow user namespaces: sysctl kernel.unprivileged_userns_clone=1, or run as root",
        )
    return Finding(name="bubblewrap", state="yes", detail=_output([program, "--version"]) or "", needed_for=purpose)


def _gvisor() -> Finding:
    program = shutil.which("runsc")
    if program is None:
        return Finding(
            name="gVisor", state="no", detail="no runsc", needed_for="isolation: gvisor", remedy="apt-get install runsc"
        )
    detail = (_output([program, "--version"]) or "").splitlines()[0:1]
    return Finding(name="gVisor", state="yes", detail="".join(detail), needed_for="isolation: gvisor")


def _docker() -> Finding:
    program = shutil.which("docker")
    version = _output([program, "version", "--format", "{{.Server.Version}}"]) if program else None
    if version:
        return Finding(name="Docker", state="yes", detail=version, needed_for="the docker backend, compose")
    return Finding(
        name="Docker",
        state="no",
        detail="no engine answers" if program else "not installed",
        needed_for="the docker backend, compose",
        remedy="apt-get install docker.io, then start dockerd",
    )


def _kubernetes() -> Finding:
    config = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    there = Path(config).exists()
    return Finding(
        name="Kubernetes",
        state="yes" if there else "no",
        detail=config if there else "no kubeconfig",
        needed_for="the kubernetes backend, the chart",
        remedy="" if there else "set KUBECONFIG",
    )


def _output(argv: list[str]) -> str | None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603 - fixed words
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
