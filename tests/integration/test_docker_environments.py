"""Environments in files, and in images, behind a real gateway whose hosts are containers."""

import asyncio
import contextlib
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("docker")

from envfarm.cli.local_farm import local_farm
from envfarm.core.errors import FarmError, SandboxError
from envfarm.core.ids import new_id
from envfarm.core.messages import AssistantMessage, ToolCall
from envfarm.wire.episode_client import EpisodeClient
from sandboxes.docker.sources import sources

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker")]
SECONDS = 60.0
BUSYBOX = "envfarm-test-busybox:1"
ORACLE = '''
from envfarm import Environment, Task, tool

class Oracle(Environment):
    """Says one word."""

    def tasks(self, split):
        yield Task(id="t", prompt="ask")

    @tool
    def ask(self) -> str:
        """Ask."""
        return "one"
'''
IN_BUSYBOX = f'''
from envfarm import Environment, SandboxProfile, Task
from sandboxes.tools.files import Files
from sandboxes.tools.python import Python
from sandboxes.tools.shell import Shell

class InBusybox(Environment):
    """All toolsets in an image that has a shell and little else."""

    profile = SandboxProfile(image="{BUSYBOX}")
    toolsets = (Shell, Files, Python)

    def tasks(self, split):
        yield Task(id="t", prompt="work")
'''


@pytest.fixture
def code(tmp_path):
    """A folder for environments; nobody but us may enter what it lies in."""
    folder = tmp_path / "code"
    folder.mkdir(mode=0o755)
    return folder


@contextlib.asynccontextmanager
async def serving(state, host_image, environment, *options):
    """A client of a gateway with hosts in containers."""
    options = (f"host_image={host_image}", "pull=never", *options)
    async with (
        local_farm(
            state, environments=[environment], policy=None, slots=2, backend="docker", backend_options=options
        ) as farm,
        EpisodeClient(farm.channel) as client,
    ):
        yield client


@contextlib.asynccontextmanager
async def opened(client, environment):
    """A function that calls a tool of an episode and returns what it answers."""
    (task,) = await client.tasks(environment, "train", 0, 1)
    episode = await client.open(environment=environment, task=task, seed=1, request_id=new_id("r"), timeout=SECONDS)
    steps = iter(range(1000))

    async def call(name, **arguments):
        message = AssistantMessage(
            content="", tool_calls=(ToolCall(id="c", name=name, arguments=json.dumps(arguments)),)
        )
        answer = await client.step(episode.handle, next(steps), message, timeout=SECONDS)
        return answer.messages[-1].content

    try:
        yield call
    finally:
        await client.close(episode.handle)


async def test_an_environment_in_a_file_needs_no_mount_by_hand(host_image, tmp_path, code):
    (code / "oracle.py").write_text(ORACLE)
    environment = f"{code / 'oracle.py'}:Oracle"
    async with serving(tmp_path / "s", host_image, environment) as client, opened(client, environment) as call:
        assert await call("ask") == "one"


async def test_a_relative_path_is_the_same_file_in_a_container(host_image, tmp_path, code, monkeypatch):
    (code / "oracle.py").write_text(ORACLE)
    monkeypatch.chdir(tmp_path)
    environment = "code/oracle.py:Oracle"
    async with serving(tmp_path / "s", host_image, environment) as client, opened(client, environment) as call:
        assert await call("ask") == "one"


@pytest.mark.slow
async def test_an_edited_environment_is_seen_by_the_next_episode_in_a_container(host_image, tmp_path, code):
    (code / "oracle.py").write_text(ORACLE)
    environment = f"{code / 'oracle.py'}:Oracle"
    async with serving(tmp_path / "s", host_image, environment, "reload=true") as client:
        (code / "oracle.py").write_text(ORACLE.replace('"one"', '"two"'))
        said = ""
        async with asyncio.timeout(SECONDS):
            while said != "two":
                with contextlib.suppress(FarmError):  # in the moment of the change
                    async with opened(client, environment) as call:
                        said = await call("ask")
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing.py:Oracle", "no file"),
        ("closed/oracle.py:Oracle", "chmod o\\+rx"),
        ("secret.py:Oracle", "chmod o\\+r "),
    ],
)
def test_a_file_that_a_host_could_not_read_is_refused_with_the_remedy(code, name, says):
    for file in (code / "closed" / "oracle.py", code / "secret.py"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
    (code / "closed").chmod(0o700)
    (code / "secret.py").chmod(0o600)
    with pytest.raises(SandboxError, match=says):
        sources([f"{code}/{name}"], [], 65_531, Path("/"))


def test_a_file_in_a_folder_of_the_system_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "x.py"
    file.write_text("")
    monkeypatch.setattr("sandboxes.docker.sources._SYSTEM", (str(tmp_path),))
    with pytest.raises(SandboxError, match="folder of its own"):
        sources([f"{file}:X"], [], 65_531, Path("/"))


def test_folders_are_mounted_once_and_not_where_a_mount_brings_them_already(code):
    for name in ("a.py", "b.py", "in/c.py", "in/d.py"):
        (code / name).parent.mkdir(exist_ok=True)
        (code / name).write_text("")
    names = [f"{code}/{name}:X" for name in ("a.py", "b.py", "in/c.py")]
    found = sources([*names, "in/d.py:X", "/there/x.py:X", "stockroom", "module:X"], ["/here:/there"], 0, code)
    assert found.mounts == (str(code),)
    assert found.workdir == str(code)


@pytest.fixture
def busybox(docker_engine, tmp_path):
    """An image of busybox alone."""
    program = shutil.which("busybox")
    if program is None or subprocess.run(["ldd", program], check=False, capture_output=True).returncode == 0:
        pytest.skip("needs a static busybox on PATH: apt-get install busybox-static")
    root = tmp_path / "image"
    (root / "bin").mkdir(parents=True)
    shutil.copy(program, root / "bin" / "busybox")
    listed = subprocess.run([program, "--list"], capture_output=True, text=True, check=True, timeout=60)
    for name in listed.stdout.split():
        if name != "busybox":
            (root / "bin" / name).symlink_to("busybox")
    with tarfile.open(tmp_path / "image.tar", "w") as tar:
        tar.add(root, ".")
    subprocess.run(["docker", "import", tmp_path / "image.tar", BUSYBOX], check=True, capture_output=True, timeout=60)
    yield BUSYBOX
    for volume in docker_engine.volumes(filters={"label": f"envfarm.image.name={BUSYBOX}"})["Volumes"] or []:
        docker_engine.remove_volume(volume["Name"])
    docker_engine.remove_image(BUSYBOX)


async def test_shell_and_files_work_in_an_image_without_python_and_python_says_that_it_is_missing(
    busybox, host_image, tmp_path, code
):
    (code / "boxes.py").write_text(IN_BUSYBOX)
    environment = f"{code / 'boxes.py'}:InBusybox"
    async with serving(tmp_path / "s", host_image, environment) as client, opened(client, environment) as call:
        assert await call("bash", command="cd /tmp; x=7; echo made > /workspace/a.txt") == "(no output)"
        assert await call("bash", command="echo $x in $(pwd); cat /workspace/a.txt; ls /bin/python3") == (
            "7 in /tmp\nmade\nls: /bin/python3: No such file or directory\n[exit code 1]"
        )
        made = await call("str_replace_editor", command="create", path="/workspace/b.txt", file_text="from outside\n")
        assert "error" not in made
        assert "made" in await call("str_replace_editor", command="view", path="/workspace/a.txt")
        assert await call("python", code="1 + 1") == f"error: there is no python3 in the image {BUSYBOX}"
        assert await call("bash", command="cat /workspace/b.txt") == "from outside"  # the episode goes on
