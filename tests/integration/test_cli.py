"""The command line as people meet it: real processes, their output and their exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from envfarm.inference.policies import shipped

STOCKROOM = shipped("stockroom")


def envfarm(*words: str, cwd: Path | None = None, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "envfarm.cli.main", *words],
        capture_output=True, text=True, timeout=seconds, cwd=cwd, check=False,
    )  # fmt: skip


def test_help_lists_every_command_with_nothing_but_the_base_install_loaded() -> None:
    done = envfarm("--help")
    for command in ("demo", "rollout", "env", "doctor", "gateway", "host", "worker", "engine", "train"):
        assert f" {command} " in done.stdout
    heavy = ("torch", "transformers", "tokenizers", "renderers", "aiohttp", "reasoning_gym")
    program = f"import sys, envfarm.cli.main; print([m for m in {heavy} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert loaded.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["demo", "rollout", "doctor", "gateway", "host", "worker", "engine", "train"])
def test_every_command_says_what_it_is_for(command: str) -> None:
    done = envfarm(command, "--help")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 200


def test_doctor_reports_abilities_as_json() -> None:
    found = {f["name"]: f for f in json.loads(envfarm("doctor", "--json").stdout)}
    assert found["machine"]["state"] in ("yes", "limited")
    assert all(f["remedy"] or f["state"] != "no" for f in found.values())


def test_env_list_knows_the_built_in_environments() -> None:
    names = {row["name"]: row for row in json.loads(envfarm("env", "list", "--json").stdout)}
    assert "answer" in names["stockroom"]["tools"]
    assert "python" in names["reasoning_gym"]["tools"]


@pytest.mark.parametrize("command", [("rollout", "--env"), ("env", "test")])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("stokroom", "no environment named 'stokroom'; did you mean 'stockroom'?"),
        ("nowhere.py:Shop", "nowhere.py; an environment in a file is named FILE.py:CLASS"),
        ("shop.py", "write shop.py:CLASS"),
    ],
)
def test_a_name_that_can_be_no_environment_is_told_in_one_line_before_anything_starts(
    command: tuple[str, ...], name: str, told: str, tmp_path: Path
) -> None:
    done = envfarm(*command, name, cwd=tmp_path)
    assert done.returncode == 1
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_env_show_prints_tools_limits_weights_and_tasks() -> None:
    facts = json.loads(envfarm("env", "show", "stockroom", "--json").stdout)
    assert {t["name"] for t in facts["tools"]} >= {"quantity", "answer"}
    assert facts["reward"]["weights"]["completion"] > 0
    assert all(len(facts["tasks"][split]) == 3 for split in ("train", "validation", "test"))


def test_a_new_environment_passes_its_own_checks(tmp_path: Path) -> None:
    assert envfarm("env", "new", "guess_it", "--folder", str(tmp_path)).returncode == 0
    done = envfarm("env", "test", f"{tmp_path}/guess_it.py:GuessIt", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads(done.stdout)
    assert len(checks) >= 8
    assert all(c["ok"] for c in checks)


def test_a_broken_environment_fails_its_check_by_name_and_without_a_stack_trace(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from envfarm import Environment, Task, tool\n"
        "class Broken(Environment):\n"
        "    def tasks(self, split):\n        yield Task(id='a', prompt='x')\n"
        "    def reset(self, task):\n        raise ValueError('no shelf')\n"
        "    @tool\n    def look(self) -> str:\n        'Look.'\n        return 'x'\n"
    )
    done = envfarm("env", "test", f"{tmp_path}/broken.py:Broken")
    assert done.returncode == 1
    assert "no shelf" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["env", "show", "stockrom"], "did you mean 'stockroom'"),
        (["env", "show", "no_such_module:Thing"], "no_such_module"),
        (["env", "show", "missing.py:Thing"], "missing.py"),
        (["env", "new", "Bad-Name"], "snake case"),
        (["rollout", "--env", "stockroom", "--policy", "/nowhere"], "/nowhere"),
        (["rollout", "--env", "stockrom"], "stockrom"),
        (["demo", "--json", "/nowhere/x.json"], "/nowhere"),
        (["demo", "--json", "/"], "is a folder"),
        (["demo", "--out", "/proc/demo"], "/proc/demo"),
        (["gateway", "--state", "state", "--listen", "127.0.0.1:99999"], "65535"),
        (["rollout", "--env", "stockroom", "--engine", "http://127.0.0.1:1"], "127.0.0.1:1"),
        (
            [
                "worker",
                "--run",
                "r",
                "--tokenizer",
                str(STOCKROOM),
                "--engine",
                "http://127.0.0.1:1",
                "--gateway",
                "127.0.0.1:1",
            ],
            "no gateway answers at 127.0.0.1:1",
        ),
    ],
)
def test_a_mistake_gets_one_sentence_that_names_the_thing(words: list[str], named: str, tmp_path: Path) -> None:
    done = envfarm(*words, cwd=tmp_path)
    assert done.returncode != 0
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_a_terminal_that_knows_only_ascii_gets_question_marks_instead_of_a_trace(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "envfarm.cli.main", "env", "test", "stockroom"],
        capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
