"""Generate ``envfarm/wire/v1`` from ``protos/envfarm/v1``: ``python protos/generate.py [--check] [--lint]``.

The generated modules live under ``envfarm.wire.v1`` while the protos' own package stays ``envfarm.v1``, so their
imports of each other are rewritten. ``--check`` writes nothing and fails when the checked-in files are stale.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

PROTOS = Path(__file__).resolve().parent
TARGET = PROTOS.parent / "envfarm" / "wire" / "v1"
PACKAGE_DOC = '"""Generated from protos/envfarm/v1 by protos/generate.py; do not edit."""\n'


def google_protos() -> Path:
    """Folder that holds ``google/rpc/status.proto``, from the package googleapis-common-protos."""
    spec = find_spec("google.rpc")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("googleapis-common-protos is not installed; run: pip install -e '.[dev]'")
    return Path(next(iter(spec.submodule_search_locations))).parent.parent


def generate(out: Path) -> None:
    """Write the modules and their stubs into ``out``."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", f"-I{google_protos()}"]
        command += [f"--{kind}_out={scratch}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        sources = sorted(str(p.relative_to(PROTOS)) for p in (PROTOS / "envfarm" / "v1").glob("*.proto"))
        subprocess.run([*command, *sources], check=True, env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"})
        out.mkdir(parents=True, exist_ok=True)
        for path in sorted(Path(scratch).rglob("*.py*")):
            text = path.read_text()
            text = re.sub(r"\bfrom envfarm\.v1 import", "from envfarm.wire.v1 import", text)
            text = re.sub(r"\benvfarm\.v1\.(\w+_pb2)\b", r"envfarm.wire.v1.\1", text)
            (out / path.name).write_text(text)
    (out / "__init__.py").write_text(PACKAGE_DOC)


def stale() -> list[str]:
    """Names of checked-in files that differ from a fresh generation."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        generate(fresh)
        now = {p.name: p.read_bytes() for p in TARGET.glob("*.py*") if p.is_file()}
        new = {p.name: p.read_bytes() for p in fresh.glob("*.py*")}
    return sorted(name for name in now.keys() | new.keys() if now.get(name) != new.get(name))


def lint() -> int:
    """Run ``buf lint``; Google's own protos are copied beside ours for it, since buf reads no Python packages."""
    deps = PROTOS / ".deps" / "google" / "rpc"
    deps.mkdir(parents=True, exist_ok=True)
    shutil.copy(google_protos() / "google" / "rpc" / "status.proto", deps)
    return subprocess.run([Path(sys.executable).parent / "buf", "lint"], cwd=PROTOS, check=False).returncode


def main() -> None:
    """Parse flags and do what they say."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="fail when checked-in files are stale")
    parser.add_argument("--lint", action="store_true", help="run buf lint")
    options = parser.parse_args()
    if options.lint and lint():
        sys.exit(1)
    if options.check:
        if names := stale():
            sys.exit(f"generated files are stale: {', '.join(names)}; run: make protos")
    elif not options.lint:
        generate(TARGET)


if __name__ == "__main__":
    main()
