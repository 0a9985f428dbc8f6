"""One rank's model and optimiser: an update from a batch, a checkpoint, the weights. No network but collectives.

Every method is collective: all ranks call it in the same order. Randomness is a function of (seed, update, rank), so
that nothing of it has to be stored for a resumed run to go on exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from envfarm.core.ids import derived_seed
from trainer_bridge import checkpoint, fsdp
from trainer_bridge.batches import MicroBatch, Minibatch
from trainer_bridge.losses import Clip, policy_loss
from trainer_bridge.model import Policy, load_policy, token_logprobs
from trainer_bridge.ranks import Ranks
from trainer_bridge.settings import TrainSettings


class UpdateShard(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's share of what makes one version: its minibatches in order. ``number`` counts updates from 0."""

    number: int
    version: int
    minibatches: tuple[Minibatch, ...]
    temperature: float = 1.0


class UpdateMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Means over all trained tokens of all ranks; ``mismatch_current`` only over tokens of the trainer's version."""

    loss: float
    kl: float
    entropy: float
    grad_norm: float
    clip_fraction: float
    mismatch: float
    mismatch_max: float
    mismatch_current: float | None
    tokens: int


_SUMS = ("loss", "kl", "entropy", "clip_fraction", "mismatch")


class Learner:
    """The policy on this rank, sharded over all, with its AdamW."""

    def __init__(self, settings: TrainSettings, ranks: Ranks) -> None:
        torch.set_num_threads(settings.compute.threads)
        self._settings = settings
        self._ranks = ranks
        self._policy: Policy = load_policy(settings.policy, device=settings.compute.device)
        fsdp.shard(self._policy.model, ranks)
        options = settings.optimiser
        self._optimiser = torch.optim.AdamW(
            self._policy.model.parameters(), lr=options.lr, betas=options.betas, weight_decay=options.weight_decay
        )
        self._clip = Clip(settings.loss.clip, settings.loss.clip_high, settings.loss.tis)

    @property
    def policy(self) -> Policy:
        """The policy; its model's parameters are sharded."""
        return self._policy

    def update(self, shard: UpdateShard) -> UpdateMetrics:
        """One optimiser step per minibatch. The log-probabilities before the update are taken under the old weights."""
        torch.set_num_threads(self._settings.compute.threads)  # holds per thread, and this may be another one
        torch.manual_seed(derived_seed("update", self._settings.seed, shard.number, self._ranks.rank))
        warmup = min(1.0, (shard.number + 1) / max(1, self._settings.optimiser.warmup))
        for group in self._optimiser.param_groups:
            group["lr"] = self._settings.optimiser.lr * warmup
        before = [None, *(self._logprobs_of(m, shard.temperature) for m in shard.minibatches[1:])]
        tally = _Tally(shard.version)
        norms = [
            self._minibatch(minibatch, old, shard.temperature, tally)
            for minibatch, old in zip(shard.minibatches, before, strict=True)
        ]
        return tally.over(self._ranks, norms)

    def save(self, folder: Path) -> None:
        """Write model and optimiser to ``folder``."""
        checkpoint.write_shards(self._policy.model, self._optimiser, folder)

    def load(self, folder: Path) -> None:
        """Restore model and optimiser, whatever the number of ranks was that wrote them."""
        checkpoint.read_shards(self._policy.model, self._optimiser, folder)

    def weights(self) -> dict[str, Tensor]:
        """Full weights on rank 0, nothing elsewhere."""
        return fsdp.full_weights(self._policy.model)

    def _minibatch(self, minibatch: Minibatch, old: list[Tensor] | None, temperature: float, tally: _Tally) -> float:
        self._optimiser.zero_grad(set_to_none=True)
        for at, micro in enumerate(minibatch.micro_batches):
            new, entropy = self._forward(micro, temperature)
            sampler = self._tensor(micro.logprobs)
            before = new.detach() if old is None else old[at]  # the first minibatch still has the old weights
            loss = policy_loss(
                new=new,
                old=before,
                sampler=sampler,
                advantages=self._tensor(micro.advantages),
                entropy=entropy,
                clip=self._clip,
                denominator=minibatch.denominator,
            )
            # Sharded gradients are averaged over ranks; the denominator is global already, so the sum is wanted.
            torch.autograd.backward(loss.total * self._ranks.world)
            tally.add(loss.sums, loss.mismatch_max, micro, (before - sampler).abs())
        norm = fsdp.clip_gradients(self._policy.model.parameters(), self._settings.optimiser.clip_norm)
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"gradient norm is {norm} in the update to version {tally.version + 1}: expected a finite number; "
                "lower --lr or look at the batch's log-probabilities"
            )
        self._optimiser.step()
        return norm

    @torch.no_grad()
    def _logprobs_of(self, minibatch: Minibatch, temperature: float) -> list[Tensor]:
        return [self._forward(micro, temperature)[0] for micro in minibatch.micro_batches]

    def _forward(self, micro: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            self._policy.model,
            self._tensor(micro.input_ids),
            self._tensor(micro.select),
            self._tensor(micro.targets),
            temperature=temperature,
        )

    def _tensor(self, array: object) -> Tensor:
        return torch.as_tensor(array, device=self._settings.compute.device)


class _Tally:
    """Sums over the micro-batches of this rank."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self._tokens = 0
        self._largest = 0.0
        self._current = [0.0, 0.0]  # sum and count over tokens of the trainer's own version

    def add(self, sums: dict[str, float], largest: float, micro: MicroBatch, mismatch: Tensor) -> None:
        for name in _SUMS:
            self._sums[name] += sums[name]
        self._tokens += micro.trained
        self._largest = max(self._largest, largest)
        current = micro.versions == self.version
        self._current[0] += float(mismatch[torch.as_tensor(current)].sum())
        self._current[1] += int(current.sum())

    def over(self, ranks: Ranks, norms: Sequence[float]) -> UpdateMetrics:
        *sums, tokens, current, counted = ranks.sum([*self._sums.values(), float(self._tokens), *self._current])
        largest = ranks.maximum([self._largest])[0]
        means = {name: value / max(1.0, tokens) for name, value in zip(_SUMS, sums, strict=True)}
        return UpdateMetrics(
            **means,
            grad_norm=sum(norms) / len(norms),
            mismatch_max=largest,
            mismatch_current=current / counted if counted else None,
            tokens=int(tokens),
        )
