"""Runs hostile programs in a real slot, beside a neighbour that goes about its work, in a process of its own.

Reads names of attacks from its standard input and answers each with one line of JSON. What confines is whatever this
process can have: start it in a container, and it tells what held there.
"""

import argparse
import asyncio
import contextlib
import ctypes
import importlib.util
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

_path = Path(__file__).with_name("hostile.py")
_spec = importlib.util.spec_from_file_location("hostile", _path)
hostile = importlib.util.module_from_spec(_spec)
sys.modules["hostile"] = hostile
_spec.loader.exec_module(hostile)

KERNEL_SECONDS = 1.0  # to start a kernel in user space, and to do in it what takes little elsewhere
BEFORE = 5  # commands of the neighbour before an attack


def become(user):
    """Start again as ``user``, for whom the interpreter lies where it can be read; seen by this process only."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = Path("/root")
    interpreter = Path(sys.base_prefix).resolve()
    assert libc.unshare(0x00020000) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", b"/", None, 16384 | 1 << 19, None) == 0
    if interpreter.is_relative_to(home):
        shelf = Path("/mnt")
        assert libc.mount(bytes(interpreter), bytes(shelf), None, 4096, None) == 0
        assert libc.mount(b"none", bytes(home), b"tmpfs", 0, b"mode=755") == 0
        interpreter.mkdir(parents=True)
        assert libc.mount(bytes(shelf), bytes(interpreter), None, 8192, None) == 0
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    os.environ["HOME"] = "/nonexistent"
    os.execv(sys.executable, [sys.executable, *sys.argv])


def without_control_groups():
    """Cover the control groups of this machine, as an unprivileged container has it; seen by this process only."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x00020000) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", b"/", None, 16384 | 1 << 19, None) == 0
    assert libc.mount(b"none", b"/sys/fs/cgroup", b"tmpfs", 1, None) == 0


def children():
    """Processes of ours that nobody ended or buried."""
    return [int(p) for p in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


async def neighbourly(box, latencies, alone):
    """One small command after the other, until told to stop."""
    while not alone.is_set():
        began = time.perf_counter()
        result = await box.exec(["/bin/true"])
        assert result.exit_code == 0, result
        latencies.append(time.perf_counter() - began)


async def fight(attack, baits, boxes, python):
    """One attack, and what it did to others."""
    box, neighbour = boxes
    latencies = []
    for _ in range(BEFORE):
        began = time.perf_counter()
        assert (await neighbour.exec(["/bin/true"])).exit_code == 0
        latencies.append(time.perf_counter() - began)
    before, meanwhile = latencies, []
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    alone = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(neighbourly(neighbour, meanwhile, alone))
        began = time.perf_counter()
        limit = attack.seconds + (KERNEL_SECONDS if box.isolation.value == "gvisor" else 0.0)
        result = await box.exec([python, "-I", "-c", hostile.program(attack, baits)], seconds=limit)
        seconds = time.perf_counter() - began
        alone.set()
    left = children()
    await asyncio.to_thread(box.empty)
    await asyncio.to_thread(box.prepare)
    after = await box.exec([python, "-I", "-c", "print(6 * 7)"])
    said = (result.stdout + b"\n" + result.stderr).decode(errors="replace")
    return {
        "attack": attack.name,
        "breach": hostile.verdict(attack, output=said, exit_code=result.exit_code, timed_out=result.timed_out),
        "seconds": seconds,
        "kept": len(result.stdout) + len(result.stderr),
        "grown_bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown) * 1024,
        "left": left,
        "alive": after.stdout == b"42\n",
        "neighbour_before": before,
        "neighbour_meanwhile": meanwhile,
        "controls": sorted(box.controls),
        "isolation": box.isolation.value,
        "user": os.geteuid(),
    }


async def serve(ground, isolation="bwrap"):
    """Answer until the input ends."""
    from envfarm.core.sandbox import Isolation, SandboxProfile
    from sandboxes.isolation.bwrap import python
    from sandboxes.isolation.sandbox import slot_sandbox

    profile = SandboxProfile(
        isolation=Isolation(isolation),
        memory_bytes=hostile.MEMORY,
        disk_bytes=hostile.DISK,
        pids=hostile.PIDS,
        exec_seconds=hostile.SECONDS + KERNEL_SECONDS,
        output_bytes=hostile.OUTPUT,
    )
    attacks = {attack.name: attack for attack in hostile.ATTACKS}
    # Slots of its own: where no group counts processes, the kernel counts all of a user's on the machine.
    first = 100 + os.getpid() % 1900 * 2
    boxes = [slot_sandbox(ground, first + number, profile) for number in (0, 1)]
    with contextlib.ExitStack() as stack:
        baits = stack.enter_context(hostile.bait())
        for box in boxes:
            await asyncio.to_thread(box.prepare)
            stack.callback(box.close)
        await boxes[1].write("neighbour-secret.txt", b"theirs")
        for line in iter(sys.stdin.readline, ""):
            try:
                told = await fight(attacks[line.strip()], baits, boxes, python())
            except Exception as error:
                told = {"attack": line.strip(), "error": f"{type(error).__name__}: {error}"}
            sys.stdout.write(json.dumps(told) + "\n")
            sys.stdout.flush()


def main():
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-control-groups", action="store_true", help="hide them from this process")
    parser.add_argument("--user", type=int, help="be this user")
    parser.add_argument("--isolation", default="bwrap", help="level at which commands are confined")
    parser.add_argument("--no-mounts", action="store_true", help="workspaces are plain folders")
    options = parser.parse_args()
    if options.no_control_groups:
        without_control_groups()
    if options.user is not None and os.geteuid() != options.user:
        become(options.user)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from sandboxes.isolation import mounts

    if options.no_mounts:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(serve(Path(folder), options.isolation))
        return
    ground = mounts.own_ground()
    try:
        asyncio.run(serve(ground, options.isolation))
    finally:
        mounts.leave_ground(ground)


if __name__ == "__main__":
    main()
