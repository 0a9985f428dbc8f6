"""A slot is used again only when nothing of its last episode is left; else it is in quarantine with the cause."""

import asyncio
import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from envfarm.core.environment import Environment
from envfarm.core.errors import Unavailable
from envfarm.core.sandbox import Isolation, SandboxProfile
from sandboxes.host.environments import Loaded
from sandboxes.host.recycling import Recycling
from sandboxes.host.slot import Slot
from sandboxes.isolation import cleanliness, mounts
from sandboxes.isolation.cleanliness import Dirty
from sandboxes.isolation.processes import stragglers
from sandboxes.isolation.sandbox import slot_sandbox
from sandboxes.isolation.user import sandbox_user

NUMBER = 3_211  # of a slot that no other host on this machine has
libc = ctypes.CDLL(None, use_errno=True)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount, and be several users")


class Runs(Environment):
    """Runs code."""

    executes = True
    profile = SandboxProfile()

    def reset(self, task):
        return "go"


@pytest.fixture
def ground():
    with tempfile.TemporaryDirectory(prefix="ef-", dir="/tmp") as folder:  # commands are somebody else and must pass
        Path(folder).chmod(0o711)
        yield Path(folder)


@pytest.fixture
def sandbox(ground, monkeypatch):
    monkeypatch.setattr(mounts, "_private", False)  # whatever ran before in this process: plain folders
    made = slot_sandbox(ground, NUMBER, SandboxProfile())
    made.prepare()
    yield made
    made.close()


@pytest.fixture
def folder(ground):
    return ground / f"slot-{NUMBER}"


@contextlib.contextmanager
def process(user=None, **options):
    """Sleeps, as ``user`` if given, and then forbids to look into it, so that its folder in /proc is root's."""
    become = f"os.setresuid({user}, {user}, {user}); ctypes.CDLL(None).prctl(4, 0)" if user is not None else ""
    code = f"import ctypes, os, time; {become}; print(1, flush=True); time.sleep(60)"
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, start_new_session=True, stdout=subprocess.PIPE, **options) as made:
        made.stdout.readline()
        try:
            yield made
        finally:
            made.kill()


async def test_a_used_slot_is_empty_afterwards_and_an_untouched_one_is_left_alone(sandbox, folder):
    canary = cleanliness.canary_in(folder)
    assert canary is not None
    sandbox.empty()
    assert cleanliness.canary_in(folder) == canary
    assert not sandbox.touched
    result = await sandbox.exec(["sh", "-c", "echo x > a; mkdir -p b/c; echo y > /tmp/z; ls -A /"])
    assert result.exit_code == 0
    assert canary.encode() not in result.stdout
    assert sandbox.touched
    await asyncio.to_thread(sandbox.empty)
    assert not sandbox.touched
    assert list(folder.iterdir()) == []


async def test_a_file_that_is_held_open_makes_a_slot_dirty_until_it_is_closed(sandbox, folder):
    await sandbox.write("kept.txt", b"x")
    with (folder / "workspace/kept.txt").open(), pytest.raises(Dirty, match=r"held open: workspace/kept\.txt"):
        sandbox.empty()
    sandbox.empty()


@needs_root
async def test_something_that_is_mounted_makes_a_slot_dirty(sandbox, folder):
    await sandbox.write("a", b"x")
    place = folder / "workspace"
    assert libc.mount(b"none", bytes(place), b"tmpfs", 0, None) == 0
    try:
        with pytest.raises(Exception, match="cannot be emptied"):
            sandbox.empty()
    finally:
        libc.umount2(bytes(place), 2)
    sandbox.empty()


@needs_root
def test_a_mount_over_an_empty_folder_is_seen(tmp_path):
    place, other = tmp_path / "slot", tmp_path / "other"
    place.mkdir()
    other.mkdir()
    cleanliness.require_empty(place, None)
    assert libc.mount(bytes(other), bytes(place), None, 4096, None) == 0
    try:
        with pytest.raises(Dirty, match="still mounted"):
            cleanliness.require_empty(place, None)
    finally:
        libc.umount2(bytes(place), 2)


async def test_files_that_cannot_be_removed_make_a_slot_dirty(sandbox, folder, monkeypatch):
    await sandbox.write("a", b"x")
    monkeypatch.setattr("sandboxes.isolation.files.area.empty_folder", lambda _: None)
    with pytest.raises(Exception, match=r"stays in it|still in|are left in"):
        sandbox.empty()
    monkeypatch.undo()
    sandbox.empty()
    assert list(folder.iterdir()) == []


def test_a_canary_that_is_still_there_says_that_nothing_was_removed(tmp_path):
    cleanliness.lay_canary(tmp_path)
    canary = cleanliness.canary_in(tmp_path)
    with pytest.raises(Dirty, match="the canary is still in"):
        cleanliness.require_empty(tmp_path, canary)


@needs_root
async def test_a_process_of_the_slots_user_is_found_and_killed_wherever_it_hides(sandbox):
    user = sandbox_user(NUMBER)
    await sandbox.write("a", b"x")
    with process(user=user) as hidden:
        assert [found.pid for found in stragglers.of_user(user)] == [hidden.pid]
        await asyncio.gather(asyncio.to_thread(hidden.wait), asyncio.to_thread(sandbox.empty))
    assert stragglers.of_user(user) == []


@needs_root
async def test_a_process_that_does_not_end_makes_a_slot_dirty_and_is_named(sandbox, monkeypatch):
    await sandbox.write("a", b"x")
    monkeypatch.setattr(stragglers, "STAY_SECONDS", 0.1)
    with process(user=sandbox_user(NUMBER)) as stays:
        monkeypatch.setattr(stragglers.os, "kill", lambda *_: None)
        with pytest.raises(Dirty, match=rf"python.* \(process {stays.pid}\)"):
            sandbox.empty()
        monkeypatch.undo()
    sandbox.empty()


async def test_what_a_trusted_command_left_running_is_found_by_where_it_works(ground):
    sandbox = slot_sandbox(ground, NUMBER, SandboxProfile(isolation=Isolation.NONE))
    await sandbox.write("a", b"x")
    with process(cwd=ground / f"slot-{NUMBER}/workspace") as left:
        await asyncio.gather(asyncio.to_thread(left.wait), asyncio.to_thread(sandbox.empty))
    sandbox.close()


async def test_nothing_is_left_of_orphans_that_came_to_the_host(sandbox, ground):
    await sandbox.exec(["true"])  # from the first confined command on, this process adopts orphans
    trusted = slot_sandbox(ground, NUMBER + 1, SandboxProfile(isolation=Isolation.NONE))
    await trusted.exec(["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 &"])
    await asyncio.to_thread(trusted.close)
    assert [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE] == []


async def test_bounds_that_were_changed_make_a_slot_dirty_and_are_as_at_the_start_again(sandbox, folder):
    if not sandbox.controls & {"pids"}:
        pytest.skip("no control group for pids can be made here")
    await sandbox.write("a", b"x")
    pids = next(f for f in sandbox._group.bounds() if f.endswith("/pids.max"))
    await asyncio.to_thread(Path(pids).write_text, "7")
    with pytest.raises(Dirty, match=r"pids\.max is 7, not 64"):
        sandbox.empty()
    sandbox.prepare()
    assert sandbox._group.bounds()[pids] == "64"
    sandbox.empty()


# Quarantine


@pytest.fixture
async def recycling(ground):
    slots = [Slot(NUMBER + i, ground) for i in range(2)]
    made = Recycling(slots)
    yield made
    await made.close()
    for slot in slots:
        slot.close()


async def given_back(recycling, slot, loaded):
    freed = asyncio.Event()
    recycling.give_back(slot, loaded, freed.set)
    async with asyncio.timeout(10):
        await freed.wait()


async def test_a_dirty_slot_is_never_given_out_and_returns_once_it_is_clean(recycling, until, monkeypatch):
    loaded = Loaded("runs", Runs)
    slot, other = recycling.take(loaded), recycling.take(loaded)
    await slot.sandbox(loaded).write("a", b"x")
    with (slot.workspace.path / "a").open():
        await given_back(recycling, slot, loaded)
        await given_back(recycling, other, loaded)
        assert [c for c in recycling.quarantined if f"slot {slot.index}: files are held open: workspace/a" in c]
        assert recycling.unfit == ""  # not yet: it may be clean again soon
        monkeypatch.setattr("sandboxes.host.recycling.UNFIT_SECONDS", 0.0)
        assert "1 of its 2 slots" in recycling.unfit
        assert recycling.take(loaded) is other
        assert recycling.take(loaded) is None
    await until(lambda: not recycling.quarantined)
    assert recycling.unfit == ""
    assert recycling.take(loaded) is slot
    assert not slot.sandbox(loaded).touched


async def test_slots_are_prepared_ahead_and_again_after_an_episode(recycling):
    loaded = Loaded("runs", Runs)
    if loaded.refusal:
        pytest.skip(loaded.refusal)
    await recycling.prepare([loaded])
    slot = recycling.take(loaded)
    assert slot.ready_for == "runs"
    assert slot.workspace.path.is_dir()
    await slot.sandbox(loaded).exec(["touch", "a"])
    await given_back(recycling, slot, loaded)
    assert slot.ready_for == "runs"
    assert list(slot.workspace.path.iterdir()) == []


def _facts(ground):
    us = psutil.Process()
    groups = sum(len(list(p.glob(f"envfarm-{os.getpid()}-*"))) for p in Path("/sys/fs/cgroup").glob("*") if p.is_dir())
    mounted = Path("/proc/self/mountinfo").read_text().count(str(ground))
    return us.num_fds(), len(us.children(recursive=True)), groups, mounted


@pytest.mark.slow
async def test_two_hundred_recycles_leave_no_growth(recycling, ground):
    loaded = Loaded("runs", Runs)

    async def episode():
        slot = recycling.take(loaded)
        await slot.sandbox(loaded).exec(["sh", "-c", "setsid sleep 60 & echo x > a; mkdir -p d/e; mkfifo p"])
        await given_back(recycling, slot, loaded)
        assert recycling.quarantined == []

    for _ in range(20):
        await episode()
    before, memory = _facts(ground), psutil.Process().memory_info().rss
    for _ in range(200):
        await episode()
    assert _facts(ground) == before
    assert psutil.Process().memory_info().rss - memory < 8 << 20


_HOARDER = """
from envfarm import Environment, RewardSettings, Task, tool


class Hoarder(Environment):
    \"\"\"Keeps a file of its slot open, and lets go of it when told to.\"\"\"

    executes = True
    reward = RewardSettings(weights={"completion": 1.0})
    held = []

    def tasks(self, split):
        return [Task(id="one", prompt="go")]

    def reset(self, task):
        while self.held and task.data.get("let_go"):
            self.held.pop().close()
        return "go"

    @tool
    async def hoard(self) -> None:
        \"\"\"Hold a file open.\"\"\"
        await self.sandbox.write("treasure", b"gold")
        self.held.append((self.sandbox._workspace.path / "treasure").open())
"""


async def test_a_host_says_which_slot_is_dirty_and_why_and_does_not_use_it(host_of, tmp_path, until):
    file = tmp_path / "hoarder.py"
    file.write_text(_HOARDER)
    async with host_of("Hoarder", slots=2, prefix=file) as host:
        await host.acquire("e", "Hoarder")
        await host.step("e", 0, ("hoard", {}))
        await host.release("e")
        (said,) = (await host.inspect()).quarantined
        assert "files are held open: workspace/treasure" in said
        await host.acquire("f", "Hoarder")
        with pytest.raises(Unavailable, match="1 of them quarantined"):
            await host.acquire("g", "Hoarder")
        await host.release("f")
        await host.acquire("h", "Hoarder", let_go=True)

        async def clean():
            return not (await host.inspect()).quarantined

        await until(clean)
        await host.acquire("i", "Hoarder")
