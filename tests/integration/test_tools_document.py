"""What docs/tools.md says of the toolsets is what a model sees: its environment runs, call by call."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from envfarm.core.errors import IsolationError
from sandboxes import tools
from sandboxes.isolation.bwrap import require_bwrap

try:
    require_bwrap()
except IsolationError as error:
    pytestmark = pytest.mark.skip(reason=f"needs bubblewrap: {error}")

DOCUMENT = (Path(__file__).parents[2] / "docs/tools.md").read_text()
(CODE,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
PAIRS = re.findall(r"^```call\n(\w+) (.*?)\n```\n\n```text\n(.*?)\n```$", DOCUMENT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(CODE)
    return tmp_path / "shop.py"


async def test_every_call_that_is_shown_is_answered_as_it_is_shown(shop, process_of, connection_to):
    text = shop.read_text()
    assert text.count("        Python(),\n") == 1
    # These are described as well, but have no place in a shop.
    text = text.replace("        Python(),\n", "        Python(),\n        Calculator(),\n        Shell(),\n")
    shop.write_text(text.replace("import Files", "import Calculator, Shell, Files"))
    name = f"{shop}:Shop"
    assert len(PAIRS) == DOCUMENT.count("```call\n")
    with process_of(name, prefix=None, slots=1) as process:
        async with connection_to(process) as host:
            await host.acquire("e", name, files={"notes.txt": b"fruit:\n- apples\n"})
            for index, (tool, arguments, answer) in enumerate(PAIRS):
                ran = await host.step("e", index, (tool, json.loads(arguments)))
                assert ran.results[0].content == answer, (tool, arguments)
            ran = await host.step("e", len(PAIRS), ("answer", {"value": 12}))
            assert (ran.done, ran.completion) == (True, 1.0)


def test_the_command_that_is_told_works(shop):
    (command,) = re.findall(r"^```sh\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    words = shlex.split(command)
    assert words[0] == "envfarm"
    argv = [sys.executable, "-m", "envfarm.cli.main", *words[1:]]
    done = subprocess.run(argv, cwd=shop.parent, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


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
