"""Commands in the files of an image: nothing is asked of it, not even a shell, a libc or a folder to mount on."""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from envfarm.core.sandbox import Isolation, SandboxProfile
from sandboxes.isolation.sandbox import slot_sandbox
from sandboxes.isolation.surroundings import Surroundings

pytestmark = pytest.mark.containment
PROFILE = SandboxProfile(memory_bytes=128 * 2**20, disk_bytes=8 * 2**20, pids=32, exec_seconds=5.0)
SOURCE = r"""
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "orphans")) {
        for (int i = 0; i < 3; i++) if (!fork()) { setsid(); if (!fork()) pause(); _exit(0); }
        return 7;
    }
    if (argc > 1 && !strcmp(argv[1], "abort")) abort();
    if (argc > 1 && !strcmp(argv[1], "forks")) {
        int n = 0;
        while (n < 200) { int p = fork(); if (p < 0) break; if (!p) pause(); n++; }
        printf("%s\n", n < 40 ? "bounded" : "unbounded");
        return 0;
    }
    DIR *root = opendir("/");
    for (struct dirent *e; (e = readdir(root));) if (e->d_name[0] != '.') printf("%s ", e->d_name);
    char here[256];
    FILE *f = fopen("/tmp/a", "w");
    printf("\n%d %s %s %d %s\n", getpid() > 1, getenv("GREETING"), getcwd(here, sizeof here), f != NULL,
           fopen("/written", "w") ? "writable" : "read-only");
    return 0;
}
"""


@pytest.fixture(scope="module")
def static_program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("static")
    (folder / "p.c").write_text(SOURCE)
    try:
        subprocess.run(["gcc", "-static", "-Os", "-o", folder / "p", folder / "p.c"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs gcc and a static libc")
    return folder / "p"


@pytest.fixture
def image(ground):
    """Makes a sandbox whose commands see a folder as their root, which anyone may read."""
    made = []
    base = Path("/tmp" if os.geteuid() == 0 else ground) / f"image-{os.getpid()}"

    async def sandbox(fill, env=None):
        base.mkdir(mode=0o755)
        fill(base)
        around = Surroundings(inside=Isolation.NONE, image="test", root=base, env=env or {})
        box = slot_sandbox(ground, 3, PROFILE, around)
        made.append(box)
        await asyncio.to_thread(box.prepare)
        return box

    yield sandbox
    for box in made:
        box.close()
    shutil.rmtree(base, ignore_errors=True)


async def test_an_image_of_one_static_program_is_enough(image, static_program):
    box = await image(lambda root: shutil.copy(static_program, root / "program"), env={"GREETING": "hello"})
    result = await box.exec(["/program"])
    assert result.exit_code == 0, result
    first, second = result.stdout.decode().splitlines()
    assert {"program", "dev", "proc", "tmp", "workspace"} <= set(first.split())
    assert not {"usr", "etc", "bin", "home", "root"} & set(first.split())
    layered = box._workspace.layered
    assert second == f"1 hello /workspace 1 {'writable' if layered else 'read-only'}"
    assert not (Path("/tmp") / f"image-{os.getpid()}" / "written").exists()


async def test_without_a_shell_orphans_end_bounds_hold_and_statuses_are_kept(image, static_program):
    box = await image(lambda root: shutil.copy(static_program, root / "program"))
    assert (await box.exec(["/program", "orphans"])).exit_code == 7
    assert (await box.exec(["/program", "abort"])).exit_code == 134
    assert (await box.exec(["/program", "forks"])).stdout == b"bounded\n"
    assert (await box.exec(["/bin/sh", "-c", "true"])).exit_code == 127


async def test_an_image_with_a_system_of_its_own_hides_the_machines(image):
    def fill(root):
        """As a distribution lays it out: programs, their libraries, links at the top, files of its own."""
        (root / "usr").mkdir()
        for folder in ("bin", "lib", "lib64"):
            (root / folder).symlink_to(f"usr/{folder}")
            (root / "usr" / folder).mkdir()
        for program in ("/bin/sh", "/bin/ls", "/bin/cat"):
            shutil.copy(os.path.realpath(program), root / "usr/bin" / Path(program).name)
            for word in subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout.split():
                if word.startswith("/"):
                    target = root / "usr" / Path(word).relative_to("/usr" if word.startswith("/usr") else "/")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(word, target)
        (root / "etc").mkdir()
        (root / "etc/os-release").write_text("NAME=image\n")

    box = await image(fill)
    result = await box.exec(["sh", "-c", "cat /etc/os-release; ls /usr/bin; ls /home /root /var; echo $HOME $PATH"])
    words = result.stdout.decode().split()
    assert words[:4] == ["NAME=image", "cat", "ls", "sh"], result
    assert words[4] == "/workspace"
    assert words[5].endswith(":/bin")
