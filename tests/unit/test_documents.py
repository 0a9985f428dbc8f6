"""What is written about the code is so: tests that promises name, layers that are drawn, code made of the protos."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = re.compile(r"envfarm\.\w+|sandboxes|rewards|trainer_bridge")
TABLE = re.findall(r"^\| `([\w.]+)` \| [^|]+ \| ([^|]+) \|$", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
PACKAGES = {package: words for package, words in TABLE if (ROOT / package.replace(".", "/")).is_dir()}


def promised() -> list[tuple[str, str]]:
    """(file, test) of every test that SPECIFICATION.md names; ``::test`` alone is of the file named before it."""
    text = (ROOT / "SPECIFICATION.md").read_text()
    found, file = [], ""
    for path, test in re.findall(r"`(?:([\w/]+\.py))?(?:::(test_\w+))?`", text):
        file = path or file
        if path or test:
            found.append((file, test))
    return found


def imported(package: str) -> set[str]:
    """Our packages (second level for ``envfarm``) that the modules of ``package`` import, its own left out."""
    modules: set[str] = set()
    for file in (ROOT / package.replace(".", "/")).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                modules.add(node.module or "")
            elif isinstance(node, ast.Import):
                modules.update(alias.name for alias in node.names)
    ours = {found[0] for module in modules if (found := OURS.match(module))}
    return {name.removeprefix("envfarm.") for name in ours - {package}}


def test_every_promise_is_there_and_names_only_tests_that_exist() -> None:
    text = (ROOT / "SPECIFICATION.md").read_text()
    assert re.findall(r"^\*\*(\d+)\. ", text, re.MULTILINE) == [str(number) for number in range(1, 23)]
    assert len(promised()) > 60
    for file, test in promised():
        source = (ROOT / "tests" / file).read_text()
        assert not test or f"def {test}(" in source, f"{file} has no {test}"


@pytest.mark.parametrize("package", sorted(PACKAGES.keys() - {"envfarm.cli"}))
def test_the_table_of_layers_says_what_is_imported(package: str) -> None:
    said = set(re.findall(r"[a-z_]+", re.sub(r"\([^)]*\)|`envfarm\.|`\.|`", "", PACKAGES[package]))) - {"none"}
    assert imported(package) == said


def test_generated_code_is_that_of_the_protos() -> None:
    pytest.importorskip("grpc_tools")
    argv = [sys.executable, "protos/generate.py", "--check"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
