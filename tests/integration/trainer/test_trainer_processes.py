"""``envfarm train`` as processes: ranks, torchrun, signals, death of a rank, messages to a person."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys

import psutil
import pytest
import torch

from envfarm.core.run import RunState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # every process imports torch
DEADLINE = 100.0


@contextlib.contextmanager
def started(argv, env, output):
    with output.open("wb") as sink:
        process = subprocess.Popen(argv, env=env, stdout=sink, stderr=sink)
    try:
        yield process
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        process.kill()
        process.wait(10)


async def ended(process):
    async with asyncio.timeout(DEADLINE):
        return await asyncio.to_thread(process.wait)


async def appears(path, process, output):
    async with asyncio.timeout(DEADLINE):
        while not path.exists():
            assert process.poll() is None, output.read_text()
            await asyncio.sleep(0.02)


def ranks_of(process):
    """Rank processes, in order of rank."""
    children = psutil.Process(process.pid).children()
    return sorted((c for c in children if "spawn_main" in " ".join(c.cmdline())), key=lambda c: c.pid)


async def test_two_ranks_make_the_weights_of_one(farm, tmp_path, one_thread, weights_in, lines_in):
    run = await farm.run()
    await farm.fill(run, 4)
    flags = ["--steps", "2", "--micro-tokens", "64", "--lr", "0.01"]
    for ranks in ("1", "2"):
        output = tmp_path / f"output{ranks}"
        argv = farm.command(run, tmp_path / ranks, "--ranks", ranks, *flags)
        with started(argv, one_thread, output) as process:
            assert await ended(process) == 0, output.read_text()
    single, sharded = (weights_in(tmp_path / n / "weights/v000002") for n in ("1", "2"))
    start = weights_in(farm.policy)
    assert single.keys() == sharded.keys()
    moved = max(float((single[n] - start[n]).abs().max()) for n in single)
    apart = max(float((single[n] - sharded[n]).abs().max()) for n in single)
    assert moved > 1e-3
    assert apart < 2e-5
    for a, b in zip(lines_in(tmp_path / "1"), lines_in(tmp_path / "2"), strict=True):
        for name in ("train/loss", "train/grad_norm", "train/kl", "train/entropy", "train/mismatch"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-6), name


async def test_a_checkpoint_of_two_ranks_resumes_on_one(farm, tmp_path, one_thread, weights_in):
    run = await farm.run()
    await farm.fill(run, 4)
    for ranks, steps, out in (("2", "1", "mixed"), ("1", "2", "mixed"), ("1", "2", "single")):
        output = tmp_path / "output"
        argv = farm.command(run, tmp_path / out, "--ranks", ranks, "--steps", steps, "--resume")
        with started(argv, one_thread, output) as process:
            assert await ended(process) == 0, output.read_text()
    mixed, single = (weights_in(tmp_path / n / "weights/v000002") for n in ("mixed", "single"))
    assert max(float((mixed[n] - single[n]).abs().max()) for n in single) < 2e-5


async def test_torchrun_starts_ranks_too(farm, tmp_path, one_thread):
    run = await farm.run()
    await farm.fill(run, 2)
    output = tmp_path / "output"
    command = farm.command(run, tmp_path / "out", "--steps", "1")
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    argv += ["-m", "--", *command[2:]]  # without the dashes torchrun takes --run for its own --run-path
    with started(argv, one_thread, output) as process:
        assert await ended(process) == 0, output.read_text()
    assert (tmp_path / "out/weights/v000001/model.safetensors").is_file()
    assert len(list((tmp_path / "out/checkpoints/step-000001").glob("*.distcp"))) == 2


async def test_when_a_rank_is_killed_all_end_and_the_cause_is_told(farm, tmp_path, one_thread):
    run = await farm.run()
    output, ready = tmp_path / "output", tmp_path / "ready"
    argv = farm.command(run, tmp_path / "out", "--ranks", "2", "--address-file", str(ready))
    with started(argv, one_thread, output) as process:
        await appears(ready, process, output)
        ranks = ranks_of(process)
        assert len(ranks) == 2
        ranks[1].kill()
        assert await ended(process) == 1
        assert "rank 1 was killed by SIGKILL" in output.read_text()
        assert "Traceback" not in output.read_text()
        assert not any(rank.is_running() for rank in ranks)


async def test_ranks_do_not_outlive_the_command_that_started_them(farm, tmp_path, one_thread):
    run = await farm.run()
    output, ready = tmp_path / "output", tmp_path / "ready"
    argv = farm.command(run, tmp_path / "out", "--ranks", "2", "--address-file", str(ready))
    with started(argv, one_thread, output) as process:
        await appears(ready, process, output)
        ranks = ranks_of(process)
        process.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, ranks, DEADLINE)
        assert not alive


@pytest.mark.parametrize("ranks", ["1", "2"])
async def test_sigterm_saves_a_checkpoint_and_ends_well(farm, tmp_path, one_thread, ranks):
    run = await farm.run()
    await farm.fill(run, 2)
    output, out = tmp_path / "output", tmp_path / "out"
    with started(farm.command(run, out, "--ranks", ranks), one_thread, output) as process:
        await appears(out / "metrics.jsonl", process, output)
        process.send_signal(signal.SIGTERM)
        assert await ended(process) == 0, output.read_text()
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step-000001"]
    assert "signal SIGTERM" in output.read_text()


async def test_a_kill_in_the_middle_of_training_loses_no_and_doubles_no_trajectory(
    farm, tmp_path, one_thread, lines_in
):
    run = await farm.run()
    await farm.fill(run, 2)
    output, out = tmp_path / "output", tmp_path / "out"
    flags = ["--checkpoint-minutes", "0", "--steps", "3", "--resume"]
    with started(farm.command(run, out, *flags), one_thread, output) as process:
        await appears(out / "checkpoints/step-000001", process, output)
        await farm.fill(run, 4, first=2)
        process.kill()
        await ended(process)
    with started(farm.command(run, out, *flags), one_thread, output) as process:
        assert await ended(process) == 0, output.read_text()
    assert lines_in(out)[-1]["train/trajectories"] == 24  # six groups of four, each once in this lineage


async def test_a_single_step_on_collected_episodes(farm, tmp_path, one_thread, weights_in):
    run = await farm.run(purpose="collect", group_size=1, groups_per_version=8)
    for group in range(4):
        await farm.append(farm.episode(run, group, 0, [5, 6, 7], [float(group)]))
    output = tmp_path / "output"
    flags = ["--purpose", "collect", "--advantage", "batch", "--steps", "1", "--ranks", "2"]
    with started(farm.command(run, tmp_path / "out", *flags), one_thread, output) as process:
        assert await ended(process) == 0, output.read_text()
    before, after = weights_in(farm.policy), weights_in(tmp_path / "out/weights/v000001")
    assert any(not torch.equal(before[n], after[n]) for n in before)
    assert (await farm.runs.get(run.id)).policy_version == 0  # without an engine nobody serves it


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy", "/nowhere"], "no folder /nowhere"),
        (["--run", "run-that-is-not"], "run-that-is-not"),
        (["--token-file", "/nowhere/token"], "/nowhere/token"),
    ],
)
async def test_mistakes_are_told_without_a_stack_trace(farm, tmp_path, one_thread, flags, message):
    run = await farm.run()
    output = tmp_path / "output"
    with started(farm.command(run, tmp_path / "out", *flags), one_thread, output) as process:
        assert await ended(process) not in (0, None)
    assert message in output.read_text()
    assert "Traceback" not in output.read_text()


async def test_the_help_needs_no_torch(one_thread):
    code = "import sys, trainer_bridge.command; sys.exit(bool({'torch', 'transformers', 'grpc'} & set(sys.modules)))"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=one_thread)
    async with asyncio.timeout(DEADLINE):
        assert await process.wait() == 0


async def test_a_run_that_is_stopped_already_ends_at_once(farm, tmp_path, one_thread):
    run = await farm.run()
    await farm.runs.set_state(run.id, RunState.STOPPED, "over")
    output = tmp_path / "output"
    with started(farm.command(run, tmp_path / "out"), one_thread, output) as process:
        assert await ended(process) == 0, output.read_text()
    assert "the run was stopped (over)" in output.read_text()
