"""What docs/tools.md says of the toolsets is what a model sees: its environment runs, call by call."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from envfarm.core.errors import IsolationError
from envfarm.core.sandbox import Isolation, Sandbox, SandboxProfile
from sandboxes import tools
from sandboxes.isolation.bwrap import require_bwrap

try:
    require_bwrap()
except IsolationError as error:
    pytestmark = pytest.mark.skip(reason=f"needs bubblewrap: {error}")

DOCUMENT = (Path(__file__).parents[2] / "docs/tools.md").read_text()
TOOLSETS, _, UNDERNEATH = DOCUMENT.partition("\n## The sandbox underneath\n")
CODE, SCRIPT = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)


def pairs(text: str) -> list[tuple[str, str, str]]:
    """(tool, arguments, answer) of every call that is shown."""
    found = re.findall(r"^```call\n(\w+) (.*?)\n```\n\n```text\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    assert len(found) == text.count("```call\n")
    return found


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(CODE)
    return tmp_path / "shop.py"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


async def test_every_call_that_is_shown_is_answered_as_it_is_shown(shop, process_of, connection_to):
    text = shop.read_text()
    assert text.count("        Python(),\n") == 1
    # These are described as well, but have no place in a shop.
    text = text.replace("        Python(),\n", "        Python(),\n        Calculator(),\n        Shell(),\n")
    shop.write_text(text.replace("import Files", "import Calculator, Shell, Files"))
    name = f"{shop}:Shop"
    shown = pairs(TOOLSETS)
    with process_of(name, prefix=None, slots=1) as process:
        async with connection_to(process) as host:
            await host.acquire("e", name, files={"notes.txt": b"fruit:\n- apples\n"})
            for index, (tool, arguments, answer) in enumerate(shown):
                ran = await host.step("e", index, (tool, json.loads(arguments)))
                assert ran.results[0].content == answer, (tool, arguments)
            ran = await host.step("e", len(shown), ("answer", {"value": 12}))
            assert (ran.done, ran.completion) == (True, 1.0)


async def test_every_call_upon_the_sandbox_is_answered_as_it_is_shown(script, process_of, connection_to):
    name = f"{script}:Script"
    shown = pairs(UNDERNEATH)
    with process_of(name, prefix=None, slots=1) as process:
        async with connection_to(process) as host:
            await host.acquire("e", name, files={"count.sh": b"echo 1\n"})
            for index, (tool, arguments, answer) in enumerate(shown):
                ran = await host.step("e", index, (tool, json.loads(arguments)))
                assert ran.results[0].content == answer, (tool, arguments)


@pytest.mark.parametrize("command", re.findall(r"^```sh\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL))
def test_the_commands_that_are_told_work(command, shop, script):
    assert shop.parent == script.parent
    words = shlex.split(command)
    assert words[0] == "envfarm"
    argv = [sys.executable, "-m", "envfarm.cli.main", *words[1:]]
    done = subprocess.run(argv, cwd=shop.parent, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_method_of_the_sandbox_is_in_the_table_with_its_arguments():
    rows = re.findall(r"^\| `(\w+)(?:\((.*)\))?` \| [^|]* \|$", UNDERNEATH, re.MULTILINE)
    for name, arguments in rows:
        if arguments:
            told = [argument.partition("=")[0] for argument in arguments.split(", ")]
            assert told == list(inspect.signature(getattr(Sandbox, name)).parameters)[1:], name
    assert {name for name in vars(Sandbox) if not name.startswith("_")} <= {name for name, _ in rows}


@pytest.mark.parametrize("field", msgspec.structs.fields(SandboxProfile), ids=lambda field: field.name)
def test_every_field_of_a_profile_is_in_the_table_with_its_default(field):
    (told,) = re.findall(rf"^\| `{field.name}` \| (.*?) \| .* \|$", UNDERNEATH, re.MULTILINE)
    mebibytes = re.fullmatch(r"(\d+) MiB", told)
    shown = str(int(mebibytes[1]) << 20) if mebibytes else told.strip("`").replace(",", "")
    assert shown == (str(field.default) or "empty")


def test_every_level_of_isolation_is_in_the_table():
    section = UNDERNEATH.partition("| `isolation` | needs |")[2]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(Isolation)


@pytest.mark.parametrize("toolset", ["Files", "Sql", "Http", "Shell", "Python"])
def test_every_argument_of_a_toolset_is_described(toolset):
    section = re.search(rf"^## {toolset}$(.*?)(?=^## |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert section is not None
    parameters = list(inspect.signature(getattr(tools, toolset).__init__).parameters)[1:]
    assert parameters
    assert [name for name in parameters if f"`{name}" not in section[1]] == []


@pytest.mark.parametrize("toolset", ["Files", "Sql", "Http", "Shell", "Python"])
def test_every_tool_and_its_arguments_are_in_the_tables(toolset):
    from envfarm.tools.schema import schemas

    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", DOCUMENT, re.MULTILINE))
    for schema in schemas(getattr(tools, toolset)):
        told = re.sub(r"\(.*?\)", "", rows[schema.name])
        assert re.findall(r"`(\w+)`", told) == list(json.loads(schema.parameters)["properties"])
