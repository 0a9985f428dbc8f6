"""Snapshots of a slot's files: the same files again, in the same slot, in another, on another machine."""

import asyncio
import contextlib
import io
import os
import stat
import tarfile
import threading
from functools import partial
from pathlib import Path

import msgspec
import pytest

from envfarm.core.errors import IsolationError, SandboxError
from envfarm.core.sandbox import SandboxProfile, Snapshot
from sandboxes.isolation import mounts
from sandboxes.isolation.bwrap import require_bwrap
from sandboxes.isolation.files import archive
from sandboxes.isolation.files.archive_reader import ArchiveRefused
from sandboxes.isolation.files.interruptible import Interrupted
from sandboxes.isolation.files.snapshots import SnapshotStore
from sandboxes.isolation.files.workspace import Workspace
from sandboxes.isolation.sandbox import SlotSandbox, slot_sandbox
from sandboxes.isolation.surroundings import MACHINE, Surroundings
from sandboxes.isolation.user import sandbox_user

MIB = 1 << 20
PROFILE = SandboxProfile(memory_bytes=128 * MIB, disk_bytes=16 * MIB, pids=32, exec_seconds=10.0)


@pytest.fixture
def slots(ground):
    """Makes sandboxes of one host."""
    store = SnapshotStore(ground, room_bytes=64 * MIB, count=4)
    made = []

    def slot(number, profile=PROFILE, around=MACHINE, folder=ground, kept=store):
        user = sandbox_user(number)
        files = Workspace(folder / f"slot-{number}", user, around, kept)
        made.append(SlotSandbox(f"{number}-0", files, profile, user, around))
        made[-1].fill({})
        return made[-1]

    slot.store = store
    yield slot
    for box in made:
        box.close()
    assert len(store) == 0
    assert not list(ground.glob("snapshot-*"))


async def run(box, code):
    try:
        require_bwrap()
    except IsolationError as error:
        pytest.skip(f"needs bubblewrap: {error}")
    result = await box.exec(["/bin/sh", "-c", code])
    assert result.exit_code == 0, result.stderr
    return (result.stdout + result.stderr).decode(errors="replace")


def looks(box):
    """All that is to be the same: every entry with its kind, mode, times, owner, links, contents, and holes."""
    found = {}
    for tree, top in box._workspace.trees.items():
        inodes = {}
        for folder, folders, names in os.walk(top):
            for path in [Path(folder), *(Path(folder, name) for name in folders + names)]:
                info = path.lstat()
                kind = stat.S_IFMT(info.st_mode)
                mine = info.st_uid == (box._user if box._user is not None else os.geteuid())
                content = None
                if kind == stat.S_IFREG:
                    with path.open("rb") as file:
                        content = file.read(1 << 22)
                elif kind == stat.S_IFLNK:
                    content = path.readlink()
                times = info.st_mtime_ns
                size = info.st_size if kind == stat.S_IFREG else 0
                twin = inodes.setdefault(info.st_ino, path) if info.st_nlink > 1 and kind == stat.S_IFREG else path
                found[tree, os.path.relpath(path, top)] = (
                    kind, stat.S_IMODE(info.st_mode), mine, content, times, size, os.path.relpath(twin, top),
                )  # fmt: skip
    return found


ODD = (
    "umask 022; mkdir -p a/b/empty closed; echo one > a/one; chmod 4751 a/one; ln a/one a/b/hard; ln -s /tmp/x out;"
    "ln -s ../../nowhere a/dangling; echo x > /tmp/x; chmod 600 /tmp/x; mkfifo -m 640 pipe;"
    "truncate -s 9000000 holes; echo end >> holes; echo q > closed/f; chmod 0 closed/f closed;"
    "echo odd > \"$(printf 'n\\377\\nm')\"; touch -d '2001-02-03 04:05:06.789' a/one a/b/empty a"
)


# The same slot, another slot


async def test_restored_files_are_the_same_in_every_respect(slots):
    box = slots(0)
    await run(box, ODD)
    before = looks(box)
    snapshot = await box.snapshot()
    assert snapshot.files == 9
    assert looks(box) == before  # taking it changed nothing
    await run(box, "chmod 700 closed; rm -r ./* /tmp/x; echo new > new; echo new > /tmp/new")
    await box.restore(snapshot)
    assert looks(box) == before
    assert (box._workspace.path / "holes").stat().st_blocks * 512 < MIB
    assert await run(box, "cat a/b/hard out && echo more >> a/one && tail -1 a/b/hard") == "one\nx\nmore\n"
    await box.restore(snapshot)  # again, after changes
    assert looks(box) == before


async def test_a_fork_belongs_to_its_slot_and_outlives_the_snapshot(slots):
    first, second = slots(0), slots(1)
    await run(first, ODD)
    snapshot = await first.snapshot()
    await second.restore(snapshot)
    assert looks(second) == looks(first)
    await run(second, "chmod 700 closed; echo changed > closed/f; echo mine > a/b/hard; rm -r a/b; echo > /tmp/y")
    assert (await first.read("a/one"), await first.read("a/b/hard")) == (b"one\n", b"one\n")
    await asyncio.to_thread(first.empty)
    assert len(slots.store) == 0
    assert await second.read("a/one") == b"mine\n"
    with pytest.raises(SandboxError, match="dropped when the episode that took it ends"):
        await second.restore(snapshot)
    with pytest.raises(SandboxError, match="not kept here"):
        await second.restore(Snapshot(id="0" * 16, files=0, size=0))


async def test_restoring_ends_what_runs(slots):
    box = slots(0)
    await run(box, "echo kept > kept")
    snapshot = await box.snapshot()
    command = asyncio.create_task(box.exec(["/bin/sh", "-c", "echo up > up; exec sleep 50"]))
    async with asyncio.timeout(10):
        while not [e for e in await box.list() if e.path == "up"]:  # noqa: ASYNC110 - made by another process
            await asyncio.sleep(0.01)
    await box.restore(snapshot)
    async with asyncio.timeout(5):
        assert (await command).exit_code != 0
    assert [e.path for e in await box.list()] == ["kept"]


async def test_restoring_ends_what_goes_on_between_calls(slots):
    box = slots(0)
    await run(box, "echo kept > kept")
    snapshot = await box.snapshot()
    session = await box.start(["/bin/cat"])
    await session.write(b"line\n")
    assert await session.read() == b"line\n"
    await box.restore(snapshot)
    async with asyncio.timeout(5):
        assert await session.read() == b""
    await session.close()
    assert await run(box, "cat kept") == "kept\n"


async def test_a_snapshot_while_files_change_is_whole_file_by_file(slots):
    box, stop = slots(0), threading.Event()
    here = box._workspace.path

    def write():
        number = 0
        while not stop.is_set():
            number += 1
            with contextlib.suppress(OSError):
                (here / f"f{number % 50}").write_bytes(b"%d" % number * 1000)
                (here / f"d{number % 7}").mkdir()
                (here / f"f{(number * 7) % 50}").unlink()
                (here / f"d{number % 5}").rmdir()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(4):
            await box.restore(await box.snapshot()) if not writer.is_alive() else await box.snapshot()
    finally:
        stop.set()
        writer.join()
    assert len(slots.store) == 4


async def test_changes_to_an_images_files_are_part_of_a_snapshot(slots, tmp_path_factory):
    root = tmp_path_factory.mktemp("image")
    for name in ("etc/keep", "etc/change", "opt/gone/file", "opt/again/old", "workspace/readme"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("of the image")
    around = Surroundings(image="test", root=root, workdir="/etc")
    first, second = slots(0, around=around), slots(1, around=around)
    if not first._workspace.layered:
        pytest.skip("needs overlays")
    await first.write("change", b"changed")
    await first.remove("/opt/gone")
    await first.remove("/opt/again")
    await first.write("/opt/again/new", b"new")
    await first.remove("/workspace/readme")
    await first.write("/tmp/t", b"t")
    snapshot = await first.snapshot()
    stream = io.BytesIO()
    await first.export_snapshot(snapshot, stream)
    await first.write("change", b"later")
    stream.seek(0)
    for box, source in ((second, snapshot), (first, snapshot), (second, await second.import_snapshot(stream))):
        await asyncio.to_thread(box.fill, {"/etc/other": b""})
        await box.restore(source)
        assert [e.path for e in await box.list("/opt", depth=3)] == ["again", "again/new"]
        assert [e.path for e in await box.list("/etc")] == ["change", "keep"]
        assert [await box.read(n) for n in ("keep", "change", "/tmp/t")] == [b"of the image", b"changed", b"t"]
        assert await box.list("/workspace") == []
    plain = slots(2)
    with pytest.raises(SandboxError, match="lies above image 'test'"):
        await plain.restore(snapshot)


# Bounds


async def test_number_and_bytes_of_snapshots_are_bounded(slots):
    box = slots(0)
    for _ in range(4):
        last = await box.snapshot()
    with pytest.raises(SandboxError, match="keeps 4 snapshots already"):
        await box.snapshot()
    await box.restore(last)
    await asyncio.to_thread(box.empty)
    big = slots(1, msgspec.structs.replace(PROFILE, disk_bytes=48 * MIB))
    await big.write("a", b"x" * 40 * MIB)
    kept = await big.snapshot()
    with pytest.raises(SandboxError, match="bytes left for snapshots"):
        await big.snapshot()
    assert len(slots.store) == 1
    small = slots(2)
    await small.write("mine", b"stays")
    if small._workspace.bounded:
        with pytest.raises(SandboxError, match="larger than the slot's disk"):
            await small.restore(kept)
        assert [e.path for e in await small.list()] == ["mine"]
        assert not [p for p in small._workspace.folder.parent.iterdir() if p.name.startswith("slot-2-")]


async def test_any_number_of_files_that_a_slot_can_hold_is_kept(slots):
    box = slots(0)
    await box.exec(["/bin/sh", "-c", "i=0; while [ $i -lt 3000 ] && : > f$i; do i=$((i+1)); done"])
    assert len(await box.list()) == 3000
    snapshot = await box.snapshot()
    assert snapshot.files >= 3000
    await box.remove("f0")
    await box.restore(snapshot)
    assert len(await box.list()) == 3000


async def test_a_tree_too_deep_to_copy_is_told(slots):
    box = slots(0)
    await run(box, "i=0; while [ $i -lt 300 ]; do mkdir d; cd d; i=$((i+1)); done")
    with pytest.raises(SandboxError, match="deeper than 128"):
        await box.snapshot()
    assert len(slots.store) == 0


async def test_a_cancelled_snapshot_or_restore_leaves_nothing_half_made(slots):
    box = slots(0)
    for number in range(300):
        await box.write(f"f{number}", b"x" * 10_000)
    kept = await box.snapshot()
    before = looks(box)
    for work in (box.snapshot, partial(box.restore, kept)):
        for pause in (0, 0.001, 0.01):
            task = asyncio.create_task(work())
            await asyncio.sleep(pause)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert looks(box) == before
            assert not [p for p in box._workspace.folder.parent.iterdir() if p.name.startswith("slot-0-")]
        assert all(one.ready for one in slots.store._kept.values())


# Archives


async def test_an_archive_restores_on_another_host_in_every_respect(slots, ground):
    first = slots(0)
    await run(first, ODD.replace("4751", "751"))
    os.setxattr(first._workspace.path / "a/one", "user.note", b"\xff\n")
    before = looks(first)
    stream = io.BytesIO()
    await first.export_snapshot(await first.snapshot(), stream)
    assert len(stream.getvalue()) < MIB  # the hole is none of it
    stream.seek(0)
    elsewhere = SnapshotStore(ground)
    second = slots(3, kept=elsewhere)
    await second.restore(await second.import_snapshot(stream))
    assert looks(second) == before
    assert os.getxattr(second._workspace.path / "a/one", "user.note") == b"\xff\n"


def a_tar(*members, head=b'{"image":"","trees":["tmp","workspace"],"version":1}', roots=True):
    """An archive with ``members``: pairs of attributes and data."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        folders = [({"name": n, "type": tarfile.DIRTYPE, "mode": 0o755}, b"") for n in ("workspace", "tmp")]
        for fields, data in [({"name": archive.HEAD}, head), *(folders if roots else []), *members]:
            info = tarfile.TarInfo()
            info.size = len(data)
            for key, value in fields.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(data))
    stream.seek(0)
    return stream


HARD = tarfile.LNKTYPE
A_LINK = ({"name": "workspace/l", "type": tarfile.SYMTYPE, "linkname": "/tmp"}, b"")
FOREIGN = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
HOSTILE = {
    "absolute": [({"name": "/etc/x"}, b"x")],
    "up": [({"name": "workspace/../../x"}, b"x")],
    "another part": [({"name": "root/x"}, b"x")],
    "no part": [({"name": "x"}, b"x")],
    "through a link": [A_LINK, ({"name": "workspace/l/x"}, b"x")],
    "over a link": [A_LINK, ({"name": "workspace/l"}, b"x")],
    "twice": [({"name": "workspace/a"}, b"1"), ({"name": "workspace/a"}, b"2")],
    "hard link out": [({"name": "workspace/h", "type": HARD, "linkname": "/etc/passwd"}, b"")],
    "hard link up": [({"name": "workspace/h", "type": HARD, "linkname": "workspace/../../x"}, b"")],
    "hard link to nothing": [({"name": "workspace/h", "type": HARD, "linkname": "workspace/none"}, b"")],
    "device": [({"name": "workspace/d", "type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}, b"")],
    "disk": [({"name": "workspace/d", "type": tarfile.BLKTYPE}, b"")],
    "mark of an overlay": [({"name": "workspace/w", "type": tarfile.CHRTYPE}, b"")],
    "in no folder": [({"name": "workspace/none/x"}, b"x")],
    "too large": [({"name": f"workspace/{n}"}, b"x" * 9 * MIB) for n in "ab"],
    "too deep": [({"name": "workspace" + "/d" * n, "type": tarfile.DIRTYPE}, b"") for n in range(1, 140)],
    "holes outside": [({"name": "workspace/f", "pax_headers": {archive.SIZE: "5", archive.DATA: "4-9"}}, b"xxxxx")],
    "holes twice": [({"name": "workspace/f", "pax_headers": {archive.SIZE: "9", archive.DATA: "0-3 1-3"}}, b"xxxxx")],
    "holes too large": [({"name": "workspace/f", "pax_headers": {archive.SIZE: "9" * 30}}, b"")],
    "long header": [({"name": "workspace/f", "pax_headers": {"SCHILY.xattr.user.x": "x" * 2 * MIB}}, b"")],
    "foreign holes": [({"name": "workspace/f", "pax_headers": FOREIGN}, b"9\n")],
}  # fmt: skip


@pytest.mark.parametrize("attack", HOSTILE)
async def test_a_hostile_archive_is_refused_and_writes_nothing_elsewhere(slots, attack):
    box = slots(0)
    with pytest.raises(ArchiveRefused):
        await box.import_snapshot(a_tar(*HOSTILE[attack]))
    assert len(slots.store) == 0
    assert await box.list() == []


async def test_what_is_no_archive_is_told(slots):
    box = slots(0)
    whole = a_tar(({"name": "workspace/a"}, b"x" * 5000)).getvalue()
    others = [b"", b"no tar at all" * 100, whole[: len(whole) // 2], whole[:4000], a_tar(head=b"{}").getvalue()]
    others.append(a_tar(head=b'{"image":"","trees":["workspace"],"version":9}').getvalue())
    others.append(a_tar(head=b'{"image":"","trees":["../x"],"version":1}').getvalue())
    others.append(a_tar(roots=False).getvalue())
    for data in others:
        with pytest.raises(SandboxError):
            await box.import_snapshot(io.BytesIO(data))
    with pytest.raises(SandboxError, match="above image 'other'"):
        await box.import_snapshot(a_tar(head=b'{"image":"other","trees":["tmp","workspace"],"version":1}'))
    assert len(slots.store) == 0
    good = await box.import_snapshot(io.BytesIO(whole))
    await box.restore(good)
    assert await box.read("a") == b"x" * 5000


# Without mounts


def test_snapshots_in_plain_folders_are_bounded_and_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(mounts, "_private", False)
    store = SnapshotStore(tmp_path, room_bytes=3 * MIB, count=9)
    box = Workspace(tmp_path / "slot-0", None, MACHINE, store)
    box.prepare(MIB)
    (box.path / "a").write_bytes(os.urandom(MIB))
    (box.tmp / "b").write_text("b")
    kept = store.take(box, threading.Event())
    with pytest.raises(SandboxError, match="bytes left"):
        store.take(box, threading.Event())
    (box.path / "a").unlink()
    (box.tmp / "c").write_text("c")
    box.swap(box.stage(MIB, lambda trees: store.fill(kept, box, trees, threading.Event())))
    assert ((box.path / "a").stat().st_size, sorted(p.name for p in box.tmp.iterdir())) == (MIB, ["b"])
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted):
        box.stage(MIB, lambda trees: store.fill(kept, box, trees, stop))
    box.empty()
    assert [p.name for p in tmp_path.iterdir()] == ["slot-0"]


async def test_a_sandbox_on_its_own_keeps_snapshots_too(ground):
    box = slot_sandbox(ground, 5, PROFILE)
    await box.write("a", b"1")
    kept = await box.snapshot()
    await box.write("a", b"2")
    await box.restore(kept)
    assert await box.read("a") == b"1"
    box.close()
