"""A farm in compose, as the README tells it: up, episodes, code that runs confined, an edit, down, and nothing left."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TAG = os.environ.get("TAG", "latest")
IMAGES = [f"envfarm-{name}:{TAG}" for name in ("gateway", "host", "worker")]
PROJECT = f"envfarm-test-{os.getpid()}"
SECONDS = 180
CODE = '''
from envfarm import Environment, Limits, Task


class Computes(Environment):
    """Code runs in the sandbox before the first message."""

    executes = True
    limits = Limits(steps=1)

    def tasks(self, split):
        for n in range(100):
            yield Task(id=f"{split}-{n}", data={"n": n})

    async def reset(self, task):
        program = f"import os; print({task.data['n']} * 7, len(os.listdir('/proc/self/fd')) > 0, os.getuid())"
        ran = await self.sandbox.exec(["python3", "-c", program])
        self.right = ran.stdout.split() == [str(task.data["n"] * 7).encode(), b"True", b"65534"]
        return "Say something."

    def verify(self):
        return GOOD if self.right else 0.0
'''


def ran(*words, **options):
    """Whether a command is there and ends well."""
    return shutil.which(words[0]) and subprocess.run(words, capture_output=True, check=False, **options).returncode == 0


def compose_command():
    """The plugin, or the program of its own that Debian has; ``None`` without either."""
    return next((w for w in (["docker", "compose"], ["docker-compose"]) if ran(*w, "version")), None)


def missing():
    if not ran("docker", "info"):
        return "no Docker Engine answers"
    if compose_command() is None:
        return "neither docker compose nor docker-compose is installed"
    absent = [image for image in IMAGES if not ran("docker", "image", "inspect", image)]
    return f"images {', '.join(absent)} are not there; make images" if absent else ""


pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("compose")]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Farm:
    """A copy of what compose needs, with a project name, a port and code of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.port = free_port()
        self.code = folder / "code"
        for name in ("compose.yaml", "compose.dev.yaml", "sandboxes/docker/seccomp.json"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        self.code.mkdir(mode=0o755)
        self.write("1.0")
        self.environment = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": PROJECT,
            "COMPOSE_FILE": "compose.yaml:compose.dev.yaml",
            "ENVFARM_PORT": str(self.port),
            "ENVFARM_CODE": str(self.code),
            "ENVFARM_ENVIRONMENT": "/code/computes.py:Computes stockroom",
            "TAG": TAG,
            "SLOTS": "4",
        }

    def write(self, good):
        file = self.code / "computes.py"
        file.write_text(CODE.replace("GOOD", good))
        file.chmod(0o644)

    def told(self, line):
        """Run a line of the README here."""
        line = line.partition("#")[0].replace("127.0.0.1:50051", f"127.0.0.1:{self.port}")
        line = re.sub(r"^docker compose", shlex.join(compose_command()), line)
        line = re.sub(r"^envfarm", f"{sys.executable} -m envfarm.cli.main", line)
        done = subprocess.run(
            line,
            shell=True,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def logs(self):
        words = [*compose_command(), "logs", "--no-color", "--tail", "20"]
        done = subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout

    def rollout(self, environment, count):
        text = self.told(
            f"envfarm rollout --gateway 127.0.0.1:50051 --token-file farm.token --env {environment} -n {count} --json"
        )
        return [json.loads(line) for line in text.splitlines()]


def left():
    found = []
    for kind, what in (("ps --all", "{{.Names}}"), ("volume ls", "{{.Name}}"), ("network ls", "{{.Name}}")):
        filters = ["--filter", f"label=com.docker.compose.project={PROJECT}", "--format", what]
        argv = ["docker", *kind.split(), *filters]
        found += subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    return found


def test_the_readme_s_farm_in_compose_runs_episodes_confines_code_takes_edits_and_leaves_nothing(tmp_path):
    if why := missing():
        pytest.skip(why)
    (block,) = (b for b in re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL) if "docker compose" in b)
    build, up, token, rollout, down = block.splitlines()
    assert build.startswith("make images")
    farm = Farm(tmp_path)
    try:
        farm.told(f"{up.partition('#')[0]} --no-build")
        farm.told(token)
        assert "mean" in farm.told(rollout)
        rows = farm.rollout("/code/computes.py:Computes", 6)
        assert [(row["isolation"], row["parts"]["completion"]) for row in rows] == [("container", 1.0)] * 6
        farm.write("0.5")
        end = time.monotonic() + SECONDS
        while farm.rollout("/code/computes.py:Computes", 1)[0]["parts"].get("completion") != 0.5:
            assert time.monotonic() < end, farm.logs()
    finally:
        farm.told(down)
    assert left() == []
