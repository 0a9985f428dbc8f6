"""Learning: a bandit over tokens that the loop must solve, and must not solve when rewards are shuffled."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from trainer_bridge.settings import AdvantageSettings, DataSettings, OptimiserSettings

GOOD = range(5, 15)  # tokens worth a reward; a uniform policy hits one in six
LENGTH = 6
VERSIONS = 9  # before the policy is perfect: groups that agree make no version


class TokenBandit:
    """Samples episodes from each version's folder as soon as the trainer has published it: always on policy."""

    def __init__(self, farm, run, seed):
        self.farm, self.run = farm, run
        self.generator = torch.Generator().manual_seed(seed)
        self.means = []
        self.groups = 0

    async def sample(self, folder, version):
        from transformers import AutoModelForCausalLM

        settings = self.run.settings
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        count = settings.group_size * settings.groups_per_version
        ids = torch.tensor([[1, 3, 4]] * count)
        logprobs = []
        with torch.inference_mode():
            for _ in range(LENGTH):
                table = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[:, -1], -1)
                token = torch.multinomial(table.exp(), 1, generator=self.generator)
                logprobs.append(table.gather(1, token))
                ids = torch.cat([ids, token], 1)
        known = torch.cat(logprobs, 1).numpy()
        rewards = np.isin(ids[:, 3:].numpy(), list(GOOD)).astype(float)
        self.means.append(float(rewards.mean()))
        episodes = [
            self.farm.episode(
                self.run,
                self.groups + number // settings.group_size,
                number % settings.group_size,
                row[3:].tolist(),
                rewards[number].tolist(),
                logprobs=known[number],
                version=version,
            )
            for number, row in enumerate(ids)
        ]
        self.groups += settings.groups_per_version
        await self.farm.append(*episodes)


async def trained(farm, out, engine, *, kind, shuffle=False, seed=0):
    run = await farm.run(group_size=8, groups_per_version=8, staleness=0)
    bandit = TokenBandit(farm, run, seed)

    async def sample(version):
        if version <= VERSIONS:
            await bandit.sample(out / f"weights/v{version:06d}" if version else farm.policy, version)

    await sample(0)
    engine.before_update = sample
    settings = farm.settings(
        run,
        out,
        steps=VERSIONS,
        advantage=AdvantageSettings(kind=kind),
        data=DataSettings(shuffle_rewards=shuffle),
        optimiser=OptimiserSettings(lr=5e-3),
    )
    async with asyncio.timeout(100):
        await farm.trainer(settings, engine).run()
    return bandit.means


@pytest.mark.parametrize("kind", ["turn", "grpo", "rloo"])
async def test_a_policy_learns_what_is_rewarded(farm, tmp_path, disk_engine, lines_in, kind):
    means = await trained(farm, tmp_path, disk_engine(), kind=kind)
    assert means[0] < 0.3
    assert np.mean(means[-2:]) > 0.8
    lines = lines_in(tmp_path)
    assert max(line["train/mismatch_max"] for line in lines) < 1e-4  # sampler and trainer compute the same numbers
    assert all(line["train/staleness_max"] == 0 for line in lines)


async def test_shuffled_rewards_teach_nothing(farm, tmp_path, disk_engine):
    means = await trained(farm, tmp_path, disk_engine(), kind="turn", shuffle=True)
    assert abs(np.mean(means[-2:]) - means[0]) < 0.2
