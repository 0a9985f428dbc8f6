"""What the README tells a newcomer to type works as it stands there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """Contents of the README's fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands(first: str) -> list[list[str]]:
    """The README's shell commands that begin with ``first``, in words, comments left out."""
    lines = (shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines())
    return [words for words in lines if words[:1] == [first]]


def run(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "envfarm.cli.main", *words]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)


def test_the_commands_for_a_new_environment_work_in_their_order(tmp_path: Path) -> None:
    told = [words[1:] for words in commands("envfarm") if words[1] == "env"]
    assert [words[1] for words in told] == ["new", "test"]
    for words in told:
        done = run(words, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_environment_written_by_hand_shows_and_passes_its_checks(tmp_path: Path) -> None:
    (code,) = blocks("python")
    (tmp_path / "by_hand.py").write_text(code)
    for verb in ("show", "test"):
        done = run(["env", verb, "by_hand.py:WordLength"], tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", [words for words in commands("envfarm") if words[1] != "env"], ids=" ".join)
def test_other_commands_exist_with_the_flags_that_are_shown(command: list[str], tmp_path: Path) -> None:
    flags = [word for word in command if word.startswith("-")]
    shown = run([command[1], "--help"], tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert all(flag in shown.stdout for flag in flags)


def test_make_has_every_rule_that_is_told() -> None:
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md", "envfarm/inference/policies/stockroom/README.md"):
        told = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / document).read_text(), re.MULTILINE))
        assert told, document
        assert told <= rules, document
