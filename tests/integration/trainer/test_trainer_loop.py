"""The training loop against a real gateway: versions, positions, checkpoints, pauses, reasons to stop."""

from __future__ import annotations

import asyncio

import pytest
import torch

from envfarm.core.errors import ConfigError, EngineError, FarmError
from envfarm.core.outcome import Outcome
from envfarm.core.run import RunState
from trainer_bridge.settings import AdvantageSettings, DataSettings

DEADLINE = 60.0


async def finish(trainer):
    async with asyncio.timeout(DEADLINE):
        return await trainer.run()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


async def metrics_of(farm, run, wanted):
    """Points of the run until the series ``wanted`` is there."""
    async with asyncio.timeout(DEADLINE):
        found = {}
        async for _, points in farm.runs.watch(run.id, True):
            for p in points:
                found.setdefault(p.name, []).append((p.step, p.value))
            if wanted in found:
                return found
    raise AssertionError


async def test_each_window_becomes_a_version_on_disk_then_in_the_engine_then_in_the_registry(
    farm, tmp_path, disk_engine, weights_in
):
    run = await farm.run()
    await farm.fill(run, 6)
    engine = disk_engine()
    seen = []

    async def note(version):
        seen.append((version, (await farm.runs.get(run.id)).policy_version))

    engine.before_update = note
    place = await finish(farm.trainer(farm.settings(run, tmp_path, steps=3, keep=2), engine))
    assert (place.steps, place.version, place.position, place.trained) == (3, 3, 6, 24)
    assert seen == [(1, 0), (2, 1), (3, 2)]  # no version is announced before the engine serves it
    assert (await farm.runs.get(run.id)).policy_version == 3
    folders = sorted(p.name for p in (tmp_path / "weights").iterdir())
    assert folders == ["v000002", "v000003"]  # the newest two are kept, nothing half written
    assert not same(weights_in(tmp_path / "weights/v000002"), weights_in(tmp_path / "weights/v000003"))


async def test_a_published_folder_is_a_whole_policy_in_the_names_of_its_source(farm, tmp_path, weights_in):
    from transformers import AutoModelForCausalLM

    run = await farm.run()
    await farm.fill(run, 2)
    await finish(farm.trainer(farm.settings(run, tmp_path, steps=1)))
    folder = tmp_path / "weights/v000001"
    assert {p.name for p in folder.iterdir()} == {p.name for p in farm.policy.iterdir()}
    assert (folder / "chat_template.jinja").read_text() == (farm.policy / "chat_template.jinja").read_text()
    modes = {(folder / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert modes == {(farm.policy / "config.json").stat().st_mode}
    source, written = weights_in(farm.policy), weights_in(folder)
    assert {n: (t.shape, t.dtype) for n, t in source.items()} == {n: (t.shape, t.dtype) for n, t in written.items()}
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(loaded.state_dict()["model.norm.weight"], written["model.norm.weight"])


async def test_the_metrics_of_a_version_reach_the_registry(farm, tmp_path):
    run = await farm.run()
    await farm.fill(run, 2)
    await finish(farm.trainer(farm.settings(run, tmp_path, steps=1)))
    found = await metrics_of(farm, run, "train/idle_seconds")
    names = "loss kl entropy grad_norm clip_fraction mismatch mismatch_max staleness_max staleness_mean trajectories"
    for name in [*names.split(), "dropped", "reward", "seconds", "idle_seconds"]:
        assert f"train/{name}" in found, name
    assert found["train/trajectories"] == [(1, 8.0)]
    assert found["train/staleness_max"] == [(1, 0.0)]


async def test_a_resumed_run_goes_on_exactly_as_if_it_had_never_stopped(farm, tmp_path, weights_in):
    run = await farm.run()
    await farm.fill(run, 8)
    await finish(farm.trainer(farm.settings(run, tmp_path / "whole", steps=4)))
    await finish(farm.trainer(farm.settings(run, tmp_path / "halves", steps=2)))
    place = await finish(farm.trainer(farm.settings(run, tmp_path / "halves", steps=4, resume=True)))
    assert (place.steps, place.position, place.trained) == (4, 8, 32)
    assert same(weights_in(tmp_path / "whole/weights/v000004"), weights_in(tmp_path / "halves/weights/v000004"))


async def test_a_trainer_killed_between_reading_and_committing_trains_every_trajectory_once(
    farm, tmp_path, disk_engine, weights_in
):
    """Killed after the update, before the commit and the checkpoint: the lineage goes on from the checkpoint."""
    run = await farm.run()
    await farm.fill(run, 6)
    undisturbed = await finish(farm.trainer(farm.settings(run, tmp_path / "whole", steps=3)))

    engine, reached = disk_engine(), asyncio.Event()

    async def hang_at_two(version):
        if version == 2:
            reached.set()
            await asyncio.Event().wait()

    engine.before_update = hang_at_two
    killed = asyncio.create_task(
        farm.trainer(farm.settings(run, tmp_path / "killed", steps=3, checkpoint_s=0.0), engine).run()
    )
    async with asyncio.timeout(DEADLINE):
        await reached.wait()
    killed.cancel()
    await asyncio.wait([killed])

    engine.before_update = None
    place = await finish(farm.trainer(farm.settings(run, tmp_path / "killed", steps=3, resume=True), engine))
    assert (place.steps, place.position, place.trained) == (3, 6, 24)
    assert place.trained == undisturbed.trained
    final = weights_in(tmp_path / f"killed/weights/v{place.version:06d}")
    assert same(final, weights_in(tmp_path / "whole/weights/v000003"))


async def test_weights_of_a_lost_lineage_get_no_number_again(farm, tmp_path, disk_engine):
    run = await farm.run()
    await farm.fill(run, 4)
    await farm.runs.publish_version(run.id, 5)  # by a trainer whose checkpoints are gone
    engine = disk_engine(version=5)
    place = await finish(farm.trainer(farm.settings(run, tmp_path, steps=1), engine))
    assert [version for version, _ in engine.loaded] == [6, 7]
    assert place.version == 7
    assert (await farm.runs.get(run.id)).policy_version == 7


async def test_an_engine_that_does_not_take_weights_ends_training_with_its_cause_and_a_checkpoint(
    farm, tmp_path, disk_engine, monkeypatch
):
    monkeypatch.setattr("trainer_bridge.publish.UPDATE_SECONDS", 0.2)
    run = await farm.run()
    await farm.fill(run, 2)
    engine = disk_engine()

    async def refuse(version):
        raise EngineError("out of memory")

    engine.before_update = refuse
    with pytest.raises(FarmError, match="out of memory"):
        await finish(farm.trainer(farm.settings(run, tmp_path, steps=1), engine))
    assert (await farm.runs.get(run.id)).policy_version == 0
    engine.before_update = None
    place = await finish(farm.trainer(farm.settings(run, tmp_path, steps=1, resume=True), engine))
    assert (place.steps, place.version) == (1, 1)  # the step was done: now it is served and announced
    assert engine.version == 1
    assert (await farm.runs.get(run.id)).policy_version == 1


async def test_nothing_is_trained_while_the_run_is_paused(farm, tmp_path):
    run = await farm.run()
    await farm.runs.set_state(run.id, RunState.PAUSED, "a person")
    await farm.fill(run, 2)
    ready = tmp_path / "ready"
    trainer = farm.trainer(farm.settings(run, tmp_path / "out", steps=1, address_file=ready))
    task = asyncio.create_task(trainer.run())
    async with asyncio.timeout(DEADLINE):
        while not ready.exists():  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.01)
    done, _ = await asyncio.wait([task], timeout=1.0)
    assert not done
    await farm.runs.set_state(run.id, RunState.RUNNING, "a person")
    async with asyncio.timeout(DEADLINE):
        assert (await task).steps == 1


async def test_a_stopped_run_ends_training_after_a_checkpoint(farm, tmp_path, caplog):
    run = await farm.run()
    await farm.fill(run, 3)  # the second window never fills
    task = asyncio.create_task(farm.trainer(farm.settings(run, tmp_path)).run())
    await metrics_of(farm, run, "train/idle_seconds")
    await farm.runs.set_state(run.id, RunState.STOPPED, "enough")
    with caplog.at_level("INFO"):
        async with asyncio.timeout(DEADLINE):
            place = await task
    assert place.position == 2
    assert "the run was stopped (enough)" in caplog.text
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


async def test_a_waiting_trainer_says_what_it_waits_for(farm, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("trainer_bridge.feed.SAY_SECONDS", 0.1)
    run = await farm.run()
    await farm.fill(run, 1)
    trainer = farm.trainer(farm.settings(run, tmp_path))
    with caplog.at_level("INFO"):
        task = asyncio.create_task(trainer.run())
        await metrics_of(farm, run, "train/idle_seconds")
        trainer.stop("test")
        async with asyncio.timeout(DEADLINE):
            await task
    assert "of 2 groups for version 1" in caplog.text


async def test_a_window_with_nothing_to_learn_is_passed_over_and_committed(farm, tmp_path):
    """Otherwise the gateway would wait for the trainer and the trainer for the gateway."""
    run = await farm.run()
    for group in range(2):
        await farm.append(*[farm.episode(run, group, m, [5, 6], [0.5]) for m in range(4)])
    await farm.fill(run, 2, first=2)
    place = await finish(farm.trainer(farm.settings(run, tmp_path, steps=1)))
    assert (place.steps, place.version, place.position) == (1, 1, 4)
    assert place.dropped == 8


async def test_failures_of_the_farm_change_nothing_in_what_is_learnt(farm, tmp_path, weights_in):
    rewards = [[1.0], [0.0], [0.25]]
    for name, size, failed in (("healthy", 3, 0), ("with failures", 5, 2)):
        run = await farm.run(group_size=size, groups_per_version=1)
        members = [farm.episode(run, 0, m, [5 + m, 9], r) for m, r in enumerate(rewards)]
        members += [
            farm.episode(run, 0, 3 + m, [40, 41], [0.0], outcome=Outcome.infra_failed("host died"), reward=None)
            for m in range(failed)
        ]
        await farm.append(*members)
        settings = farm.settings(run, tmp_path / name, steps=1)
        assert (await finish(farm.trainer(settings))).trained == 3
    assert same(
        weights_in(tmp_path / "healthy/weights/v000001"), weights_in(tmp_path / "with failures/weights/v000001")
    )


async def test_collected_episodes_are_trained_on_in_groups_of_one(farm, tmp_path):
    run = await farm.run(purpose="collect", group_size=1, groups_per_version=16, staleness=0)
    for group in range(5):
        await farm.append(farm.episode(run, group, 0, [5, 6, 7], [float(group)]))
    data = DataSettings(purpose="collect", singles=True, linger_s=0.5)
    settings = farm.settings(run, tmp_path, steps=1, data=data, advantage=AdvantageSettings(kind="batch"))
    place = await finish(farm.trainer(settings))
    assert (place.steps, place.position) == (1, 5)
    assert place.trained == 4  # the one in the middle is the mean


async def test_a_trainer_does_not_overwrite_checkpoints_unasked(farm, tmp_path):
    run = await farm.run()
    await farm.fill(run, 2)
    await finish(farm.trainer(farm.settings(run, tmp_path, steps=1)))
    with pytest.raises(ConfigError, match="add --resume"):
        await finish(farm.trainer(farm.settings(run, tmp_path, steps=2)))


async def test_a_checkpoint_of_another_run_is_refused(farm, tmp_path):
    run, other = await farm.run(), await farm.run()
    await farm.fill(run, 2)
    await finish(farm.trainer(farm.settings(run, tmp_path, steps=1)))
    with pytest.raises(ConfigError, match=f"of run {run.id}, not of {other.id}"):
        await finish(farm.trainer(farm.settings(other, tmp_path, steps=2, resume=True)))


async def test_only_the_newest_checkpoints_are_kept(farm, tmp_path):
    run = await farm.run()
    await farm.fill(run, 8)
    await finish(farm.trainer(farm.settings(run, tmp_path, steps=4, checkpoint_s=0.0, keep=2)))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000003", "step-000004"]


async def test_more_groups_per_version_than_the_run_hands_out_are_refused(farm, tmp_path):
    run = await farm.run(staleness=1)
    with pytest.raises(ConfigError, match="hands out at most 4 groups"):
        await finish(farm.trainer(farm.settings(run, tmp_path, data=DataSettings(groups_per_version=5))))
