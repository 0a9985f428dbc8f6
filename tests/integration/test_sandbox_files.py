"""Files of a slot, seen from the host and from inside alike; whatever is done inside, nothing leads out."""

import asyncio
import contextlib
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from envfarm.core.errors import IsolationError, SandboxError, ToolError
from envfarm.core.sandbox import FileKind, SandboxProfile
from sandboxes.isolation import mounts
from sandboxes.isolation.bwrap import require_bwrap
from sandboxes.isolation.files import access, area
from sandboxes.isolation.files.workspace import Workspace
from sandboxes.isolation.sandbox import slot_sandbox
from sandboxes.isolation.surroundings import Surroundings, surroundings

MIB = 1 << 20
PROFILE = SandboxProfile(memory_bytes=128 * MIB, disk_bytes=8 * MIB, pids=32, exec_seconds=10.0)


@pytest.fixture
def image_root():
    """Files of an image, which belong to the one who will run commands in them where that is another user."""
    root = Path(tempfile.mkdtemp(dir="/tmp", prefix="image-"))
    root.chmod(0o755)
    (root / "etc").mkdir()
    (root / "etc/motto").write_text("of the image")
    (root / "app/data").mkdir(parents=True)
    (root / "app/data/one").write_text("1")
    (root / "var").mkdir()
    (root / "var/run").symlink_to("/run")
    (root / "run").mkdir()
    yield root
    shutil.rmtree(root)


@pytest.fixture(params=["system", "image"])
async def box(request, ground, image_root):
    around = Surroundings(image="test", root=image_root) if request.param == "image" else Surroundings()
    made = slot_sandbox(ground, 7, PROFILE, around)
    await asyncio.to_thread(made.fill, {})
    yield made
    made.close()


@pytest.fixture
async def shell(ground):
    """A sandbox of the host's system, and a way to run shell code in it."""
    try:
        require_bwrap()
    except IsolationError as error:
        pytest.skip(f"needs bubblewrap: {error}")
    made = slot_sandbox(ground, 8, PROFILE)
    await asyncio.to_thread(made.prepare)

    async def run(code):
        result = await made.exec(["/bin/sh", "-c", code])
        return (result.stdout + result.stderr).decode(errors="replace")

    yield made, run
    made.close()


def on_host(box):
    return box._workspace.path


# What commands and the host see of each other


async def test_commands_and_host_see_the_same_files_in_workspace_and_tmp(shell):
    box, run = shell
    await box.write("a/b.txt", b"from the host")
    await box.write("/tmp/c", b"temporary")
    assert await run("cat a/b.txt /tmp/c && echo more >> a/b.txt && echo inside > /tmp/d") == "from the hosttemporary"
    assert await box.read("/workspace/a/b.txt") == b"from the hostmore\n"
    assert await box.read("/tmp/../tmp/./d") == b"inside\n"


async def test_files_belong_to_the_user_of_commands(shell):
    box, run = shell
    await box.write("made/by/host", b"x")
    out = await run("echo y >> made/by/host && touch made/by/me && rm -r made && echo gone")
    assert out == "gone\n"


async def test_tmp_lives_until_the_files_are_emptied(shell):
    box, run = shell
    await run("echo here > /tmp/state; echo here > state")
    assert await run("cat /tmp/state state") == "here\nhere\n"
    await asyncio.to_thread(box.empty)
    assert await box.list("/tmp") == await box.list("/workspace") == []
    assert "No such file" in await run("cat /tmp/state")


async def test_an_overwritten_file_keeps_its_mode_and_a_link_to_it_stays_a_link(shell):
    box, run = shell
    await run("echo old > tool && chmod 750 tool && ln -s tool link")
    await box.write("link", b"new")
    assert await run("stat -c %a tool; cat tool; readlink link") == "750\nnewtool\n"


async def test_disk_bytes_bound_workspace_and_tmp_together(shell):
    box, run = shell
    if not box._workspace.bounded:
        pytest.skip("needs mounts of its own")
    out = await run("head -c 6000000 /dev/zero > a && head -c 6000000 /dev/zero > /tmp/b; stat -c %s a /tmp/b")
    sizes = [int(line) for line in out.splitlines() if line.isdigit()]
    assert sizes[0] == 6_000_000
    assert sum(sizes) <= PROFILE.disk_bytes
    with pytest.raises(ToolError, match="no room left"):
        await box.write("c", b"x" * 4 * MIB)
    assert sorted(e.path for e in await box.list()) == ["a"]  # no part of it stays


async def test_too_many_files_are_refused_as_a_full_disk(shell):
    box, run = shell
    if not box._workspace.bounded:
        pytest.skip("needs mounts of its own")
    await run("i=0; while echo > f$i; do i=$((i+1)); done 2>/dev/null")
    with pytest.raises(ToolError, match="no room left"):
        await box.write("another", b"")


# Links


async def test_links_are_followed_as_a_command_inside_follows_them(shell):
    box, run = shell
    await run(
        "mkdir -p deep/er; echo one > deep/file; echo two > /tmp/two; ln -s ../file deep/er/up;"
        "ln -s /workspace/deep here; ln -s /tmp/two absolute; ln -s here/er/up chain; ln -s /tmp tmp;"
        "ln -s missing dangling; ln -s loop loop; ln -s ../../../../tmp/two far"
    )
    for name in ("deep/er/up", "here/file", "absolute", "chain", "tmp/two", "far", "here/../deep/file"):
        assert (await box.read(name)).decode() == await run(f"cat {name}"), name
    await box.write("dangling", b"made")
    assert await run("cat missing") == "made"
    with pytest.raises(ToolError, match="too many links"):
        await box.read("loop")
    assert {e.path: e.kind for e in await box.list(depth=3)}["tmp"] is FileKind.LINK


@pytest.fixture
def outside():
    """A folder of the host by whose path nothing is found inside."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="outside-"))
    yield folder
    shutil.rmtree(folder)


async def test_no_link_leads_out(shell, outside):
    box, run = shell
    secret = outside / "secret"
    secret.write_text("of the host")
    await run(
        f"ln -s {outside} folder; ln -s {secret} file; ln -s /etc/hostname etc; ln -s /proc/self/root root;"
        f"ln -s /proc/1/fd/0 fd; ln -s {'../' * 30}{outside} relative; ln -s /workspace/folder twice; mkfifo pipe;"
        "ln -s / top"
    )
    names = ["folder/secret", "file", "etc", "root/etc/passwd", "fd", "relative/secret", "twice/secret", "pipe"]
    names += [f"top{secret}", "top/etc/passwd", str(secret), "/etc/passwd", "/../etc/passwd", "/proc/self/environ"]
    names += ["/dev/null", "/", ".", "..", "", "a\0b", "/workspace/../../etc/passwd"]
    for name in names:
        with pytest.raises(ToolError):
            await box.read(name)
        with pytest.raises(ToolError):
            await box.write(name, b"broken out")
    for name in ("folder", "top", "relative", "root", "..", "/", "/etc"):
        with pytest.raises(ToolError):
            await box.list(name)
    assert secret.read_text() == "of the host"
    await box.remove("folder")  # the link
    assert secret.exists()


async def test_a_path_outside_is_refused_with_what_can_be_reached(box):
    without_image = box._workspace.root is None
    with pytest.raises(ToolError, match="only what is in /workspace or /tmp" if without_image else "no such file"):
        await box.read("/usr/no-such-file")
    with pytest.raises(ToolError, match="the sandbox's own"):
        await box.read("/proc/version")


async def test_swapping_folders_for_links_never_leads_out(shell, outside):
    box, _ = shell
    (outside / "file").write_text("outside")
    await box.write("a/file", b"inside")
    here, stop = on_host(box), threading.Event()
    (here / "b").symlink_to(outside)

    def swap():
        while not stop.is_set():
            with contextlib.suppress(OSError):
                for old, new in ("ac", "ba", "ab", "ca"):
                    (here / old).rename(here / new)

    swapper = threading.Thread(target=swap)
    swapper.start()
    seen = set()
    try:
        for number in range(400):
            with contextlib.suppress(ToolError):
                seen.add(access.read(box._workspace.tree, "a/file", 100)[:6])
            with contextlib.suppress(ToolError):
                access.write(box._workspace.tree, "a/file", b"inside%d" % number)
            with contextlib.suppress(ToolError):
                access.remove(box._workspace.tree, "a/file")
    finally:
        stop.set()
        swapper.join()
    assert seen <= {b"inside"}
    assert [p.name for p in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "outside"


# Odd files


async def test_pipes_and_folders_are_told_and_hold_nobody(shell):
    box, run = shell
    await run("mkfifo pipe; mkdir folder")
    async with asyncio.timeout(5):
        with pytest.raises(ToolError, match="pipe: not a regular file"):
            await box.read("pipe")
        with pytest.raises(ToolError, match="pipe: not a regular file"):
            await box.write("pipe", b"x")
    with pytest.raises(ToolError, match="folder: is a folder"):
        await box.read("folder")
    with pytest.raises(ToolError, match="folder: is a folder"):
        await box.write("folder", b"x")
    with pytest.raises(ToolError, match="not a folder"):
        await box.read("pipe/x")
    with pytest.raises(ToolError, match="is a file"):
        await box.list("pipe")


async def test_a_huge_file_with_holes_is_read_in_part_only(shell):
    box, _ = shell
    await box.write("small", b"start")
    os.truncate(on_host(box) / "small", 1 << 40)
    assert await box.read("small", 10) == b"start\0\0\0\0\0"


async def test_closed_and_deeply_nested_folders_can_be_removed(shell):
    box, run = shell
    await run("mkdir -p x/closed; echo > x/closed/f; chmod 0 x/closed; chmod 500 x")
    await run("i=0; mkdir deep; cd deep; while [ $i -lt 1500 ]; do mkdir d; cd d; i=$((i+1)); done; echo > bottom")
    await box.remove("x")
    await box.remove("deep")
    assert await box.list() == []
    for fixed in ("/workspace", ".", "/tmp"):
        with pytest.raises(ToolError, match="stays"):
            await box.remove(fixed)
    with pytest.raises(ToolError, match="no such file"):
        await box.remove("x")


async def test_names_that_are_not_utf8_are_listed_and_can_be_used(shell):
    box, run = shell
    await run("printf odd > \"$(printf 'n\\377\\nm')\"")
    (entry,) = await box.list()
    assert os.fsencode(entry.path) == b"n\xff\nm"
    assert await box.read(entry.path) == b"odd"
    await box.remove(entry.path)
    assert await box.list() == []


async def test_listings_are_sorted_and_bounded(box):
    for name in ("b", "a/2", "a/1/x", "a-c", "c/d/e/f"):
        await box.write(name, b"12")
    paths = [e.path for e in await box.list("/workspace", depth=9)]
    assert paths == ["a", "a/1", "a/1/x", "a/2", "a-c", "b", "c", "c/d", "c/d/e", "c/d/e/f"]
    assert [e.path for e in await box.list("/workspace", depth=2)] == ["a", "a/1", "a/2", "a-c", "b", "c", "c/d"]
    assert [e.path for e in await box.list("/workspace", depth=9, limit=3)] == paths[:3]
    entries = {e.path: e for e in await box.list("/workspace")}
    assert (entries["b"].kind, entries["b"].size, entries["a"].kind) == (FileKind.FILE, 2, FileKind.FOLDER)


# Images


async def layered(ground, around):
    made = slot_sandbox(ground, 9, PROFILE, around)
    await asyncio.to_thread(made.fill, {})
    if not made._workspace.layered:
        made.close()
        pytest.skip(f"needs overlays: {area.overlay_refusal(ground)}")
    return made


async def test_files_of_an_image_are_changed_for_one_slot_only(ground, image_root):
    around = Surroundings(image="test", root=image_root)
    box = await layered(ground, around)
    assert await box.read("/etc/motto") == b"of the image"
    await box.write("/etc/motto", b"changed")
    await box.write("/new/file", b"new")
    await box.remove("/app/data")
    assert (await box.read("/etc/motto"), await box.read("/new/file")) == (b"changed", b"new")
    assert [e.path for e in await box.list("/app")] == []
    assert {"etc", "new", "workspace", "tmp", "proc"} <= {e.path for e in await box.list("/")}
    await box.write("/var/run/pid", b"1")
    assert await box.read("/run/pid") == b"1"
    await asyncio.to_thread(box.empty)
    assert await box.read("/etc/motto") == b"of the image"
    assert [e.path for e in await box.list("/app", depth=2)] == ["data", "data/one"]
    box.close()
    assert (image_root / "etc/motto").read_text() == "of the image"
    assert sorted(p.name for p in image_root.iterdir()) == ["app", "etc", "run", "var"]


@pytest.fixture
def image_with_shell(image_root):
    """The image with a shell and a few programs of this system."""
    for name in ("bin", "lib", "lib64"):
        if not Path("/", name).is_symlink():
            pytest.skip("needs a system whose programs are all in /usr")
        (image_root / name).symlink_to(f"usr/{name}")
    wanted = [Path("/usr/bin", name) for name in ("sh", "cat", "rm", "mv", "ls")]
    for library in ("libc.so.6", "libselinux.so.1", "libpcre2-8.so.0", "libacl.so.1", "libattr.so.1"):
        wanted += Path("/usr/lib").glob(f"*/{library}")
    for file in [*wanted, *Path("/usr/lib64").glob("ld-*")]:
        copy = image_root / file.relative_to("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    return image_root


async def test_commands_may_change_what_is_roots_in_an_image(ground, image_with_shell):
    try:
        require_bwrap()
    except IsolationError as error:
        pytest.skip(f"needs bubblewrap: {error}")
    box = await layered(ground, Surroundings(image="test", root=image_with_shell))
    for _ in range(2):
        code = "echo more >> /etc/motto && rm -r /app && echo x > /new && mv /etc /moved && cat /moved/motto"
        result = await box.exec(["/usr/bin/sh", "-c", code])
        assert (result.stdout, result.stderr) == (b"of the imagemore\n", b"")
        await asyncio.to_thread(box.empty)
    box.close()


async def test_the_working_folder_of_an_image_holds_the_tasks_files(ground, image_root):
    box = await layered(ground, Surroundings(image="test", root=image_root, workdir="/app"))
    box.fill({"task.txt": b"do it"})
    assert await box.read("/app/task.txt") == b"do it"
    assert await box.read("data/one") == b"1"
    with pytest.raises(ToolError, match="stays"):
        await box.remove("/app")
    box.close()
    missing = await layered(ground, Surroundings(image="test", root=image_root, workdir="/var/run/made/here"))
    assert await missing.list() == []
    assert await missing.list("/run/made") != []
    missing.close()
    with pytest.raises(SandboxError, match="working folder"):
        await layered(ground, Surroundings(image="test", root=image_root, workdir="/etc/motto"))


async def test_what_an_image_has_in_workspace_is_there(ground, image_root):
    (image_root / "workspace").mkdir()
    (image_root / "workspace/readme").write_text("start here")
    box = await layered(ground, Surroundings(image="test", root=image_root))
    await box.write("mine", b"")
    assert [e.path for e in await box.list()] == ["mine", "readme"]
    box.close()
    assert [p.name for p in (image_root / "workspace").iterdir()] == ["readme"]


async def test_nothing_inside_can_move_the_places_of_mounts_out(ground, image_root):
    """A link in the place of /tmp in the root is not what the host follows: /tmp lies elsewhere."""
    box = await layered(ground, Surroundings(image="test", root=image_root))
    root = box._workspace.root
    (root / "tmp").rmdir()
    (root / "tmp").symlink_to("/etc")
    assert await box.list("/tmp") == []
    await box.write("/tmp/passwd", b"mine")
    assert (box._workspace.tmp / "passwd").read_bytes() == b"mine"
    box.close()


def test_settings_beside_the_files_of_an_image_are_read(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "image.json").write_text('{"name": "x", "env": ["PATH=/opt/bin:/bin", "A=b=c"], "workdir": "/app/"}')
    found = surroundings(inside="container", image="x", root=root)
    assert (found.env, found.workdir) == ({"PATH": "/opt/bin:/bin", "A": "b=c"}, "/app")


# Without mounts


@pytest.fixture
def plain(tmp_path, monkeypatch):
    """Files of a slot where this process may not mount."""
    monkeypatch.setattr(mounts, "_private", False)
    made = Workspace(tmp_path / "slot-0", None)
    made.prepare(MIB)
    yield made
    made.empty()
    assert list((tmp_path / "slot-0").iterdir()) == []


def test_plain_folders_serve_and_are_emptied_however_they_look(plain):
    assert not plain.bounded
    access.write(plain.tree, "/tmp/a", b"x" * 100_000)
    access.write(plain.tree, "b/c", b"y")
    (plain.path / "b").chmod(0)
    here = os.open(plain.path, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=here)
        deeper = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(here)
    assert plain.usage() == area.TOO_DEEP or plain.usage() > 1 << 61
    plain.empty()
    plain.prepare(MIB)
    assert access.listing(plain.tree, "/tmp", 1, 10) == []


# Everything at once, against a model

_NAMES = st.sampled_from(["a", "b", "a/b", "a/c", "b/a/d", "/tmp/a", "/tmp/b/c", "/workspace/c"])


class FilesAsAModel(RuleBasedStateMachine):
    """Files behave as a dictionary of absolute paths in which a file is no folder."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="model-"))
        self.workspace = Workspace(self.folder / "slot-0", None)
        self.workspace.prepare(4 * MIB)
        self.model = {}

    @staticmethod
    def full(name):
        return name if name.startswith("/") else f"/workspace/{name}"

    def blocked(self, path):
        return any(path.startswith(f"{known}/") for known in self.model)

    @rule(name=_NAMES, data=st.binary(max_size=20))
    def write(self, name, data):
        path = self.full(name)
        if self.blocked(path) or any(known.startswith(f"{path}/") for known in self.model):
            with pytest.raises(ToolError):
                access.write(self.workspace.tree, name, data)
        else:
            with contextlib.suppress(ToolError):  # an empty folder may be in its place
                access.write(self.workspace.tree, name, data)
                self.model[path] = data

    @rule(name=_NAMES)
    def remove(self, name):
        path = self.full(name)
        gone = [known for known in self.model if known == path or known.startswith(f"{path}/")]
        if gone:
            access.remove(self.workspace.tree, name)
            for known in gone:
                del self.model[known]
        else:
            with contextlib.suppress(ToolError):
                access.remove(self.workspace.tree, name)

    @rule(name=_NAMES)
    def read(self, name):
        expected = self.model.get(self.full(name))
        if expected is None:
            with pytest.raises(ToolError):
                access.read(self.workspace.tree, name, 100)
        else:
            assert access.read(self.workspace.tree, name, 100) == expected

    @precondition(lambda self: len(self.model) > 3)
    @rule()
    def empty(self):
        self.workspace.empty()
        self.workspace.prepare(4 * MIB)
        self.model = {}

    @invariant()
    def listed(self):
        found = {
            f"{top}/{e.path}": e.size
            for top in ("/workspace", "/tmp")
            for e in access.listing(self.workspace.tree, top, 9, 100)
            if e.kind is FileKind.FILE
        }
        assert found == {path: len(data) for path, data in self.model.items()}

    def teardown(self):
        self.workspace.empty()
        shutil.rmtree(self.folder)


FilesAsAModel.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
test_files_behave_as_a_model = FilesAsAModel.TestCase
