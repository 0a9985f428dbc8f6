"""Control groups of version 2: a process alone in its group moves into a leaf, so that the group can hand things down.

Real groups, with whatever controller version 1 has not taken on this machine; the rule is the same for all.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

_MOUNTS = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
UNIFIED = next((Path(fields[1]) for fields in _MOUNTS if fields[2] == "cgroup2"), None)
PROGRAM = """
import os, sys, time
from pathlib import Path
from sandboxes.isolation.cgroups import enabled_below
group, control = Path(sys.argv[1]), sys.argv[2]
(group / "cgroup.procs").write_text("0")
if sys.argv[3] == "others":
    other = os.fork()
    if other == 0:
        time.sleep(30)
        os._exit(0)
print(enabled_below(group, (control,)), Path("/proc/self/cgroup").read_text().strip().rpartition("/")[2])
print(enabled_below(group, (control,)))
if sys.argv[3] == "others":
    os.kill(other, 9)
    os.wait()
"""


@pytest.fixture
def group():
    controllers = (UNIFIED / "cgroup.controllers").read_text().split() if UNIFIED is not None else []
    domain = [name for name in controllers if name in ("hugetlb", "memory", "io", "rdma", "misc")]
    if not domain or not os.access(UNIFIED / "cgroup.subtree_control", os.W_OK):
        pytest.skip("needs a writable cgroup v2 with a controller that holds to the rule")
    handed_down = UNIFIED / "cgroup.subtree_control"
    before = handed_down.read_text().split()
    handed_down.write_text(f"+{domain[0]}")
    made = UNIFIED / f"delegated-{os.getpid()}"
    made.mkdir()
    yield made, domain[0]
    deadline = time.monotonic() + 5
    for folder in (*made.glob("*/"), made):
        while True:
            try:
                folder.rmdir()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    if domain[0] not in before:
        handed_down.write_text(f"-{domain[0]}")


def _run(group, control, company):
    argv = [sys.executable, "-c", PROGRAM, str(group), control, company]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()


def test_a_process_alone_in_its_group_moves_into_a_leaf(group):
    folder, control = group
    first, again = _run(folder, control, "alone")
    assert first.startswith(f"['{control}'] envfarm-")
    assert first.endswith("-host")
    assert again == f"['{control}']"
    assert control in (folder / "cgroup.subtree_control").read_text()


def test_a_group_with_others_in_it_hands_nothing_down_and_nobody_is_moved(group):
    folder, control = group
    assert _run(folder, control, "others") == [f"[] {folder.name}", "[]"]


def test_a_group_that_is_not_ours_to_change_gives_nothing(tmp_path):
    from sandboxes.isolation.cgroups import enabled_below

    assert enabled_below(tmp_path, ("memory",)) == []
