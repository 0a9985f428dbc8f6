"""The policy loss per token and what is measured beside it. Torch, no I/O, no distributed calls.

All functions take tensors [N], one entry per trained token of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds of the policy ratio: ``1 - low`` to ``1 + high``; ``tis`` caps the sampler correction (``None``: off)."""

    low: float = 0.2
    high: float = 0.28
    tis: float | None = 2.0


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """``total``: the scalar to differentiate, a sum over tokens divided by the global count.

    ``sums``: detached sums over tokens; divide by ``tokens`` for means. ``mismatch_max`` is a maximum.
    """

    total: Tensor
    sums: dict[str, float]
    mismatch_max: float
    tokens: int


def clipped_surrogate(new: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)`` with ``r = exp(new - old)``; shape [N].

    Schulman et al. 2017 (PPO, arXiv 1707.06347), eq. 7; with ``high > low`` the clip-higher of Yu et al. 2025 (DAPO,
    arXiv 2503.14476), eq. 10, which lets unlikely tokens grow.
    """
    ratio = torch.exp(new - old)
    return -torch.minimum(ratio * advantages, ratio.clamp(1.0 - low, 1.0 + high) * advantages)


def truncated_importance(old: Tensor, sampler: Tensor, cap: float) -> Tensor:
    """``min(exp(old - sampler), cap)``: corrects for the sampler not being the trainer's policy; shape [N], detached.

    Yao et al. 2025 (Your Efficient RL Framework Secretly Brings You Off-Policy RL Training); truncation after Ionides
    2008. ``old`` is the trainer's own log-probability before the update, ``sampler`` the engine's.
    """
    return torch.exp(old - sampler).clamp(max=cap).detach()


def k3(new: Tensor, sampler: Tensor) -> Tensor:
    """``(r - 1) - log r`` with ``r = exp(new - sampler)``: estimates KL(sampler || new), never negative; shape [N].

    Schulman 2020 (Approximating KL Divergence), estimator k3.
    """
    log_ratio = new - sampler
    return torch.expm1(log_ratio) - log_ratio


def policy_loss(
    *, new: Tensor, old: Tensor, sampler: Tensor, advantages: Tensor, entropy: Tensor, clip: Clip, denominator: int
) -> PolicyLoss:
    """Clipped surrogate with sampler correction, summed and divided by ``denominator``.

    ``denominator`` is the number of trained tokens of the whole minibatch over all micro-batches and ranks, so that
    every token weighs the same and the split changes nothing (token-level loss, Yu et al. 2025, eq. 12). Without
    ``clip.tis`` the ratio is taken against the sampler itself (plain PPO), and ``old`` serves the metrics only.
    """
    reference = sampler if clip.tis is None else old
    per_token = clipped_surrogate(new, reference, advantages, clip.low, clip.high)
    if clip.tis is not None:
        per_token = per_token * truncated_importance(old, sampler, clip.tis)
    with torch.no_grad():
        ratio = torch.exp(new - reference)
        clipped = ((ratio > 1.0 + clip.high) & (advantages > 0)) | ((ratio < 1.0 - clip.low) & (advantages < 0))
        mismatch = (old - sampler).abs()
        sums = {
            "loss": float(per_token.sum()),
            "kl": float(k3(new, sampler).sum()),
            "entropy": float(entropy.sum()),
            "clip_fraction": float(clipped.sum()),
            "mismatch": float(mismatch.sum()),
        }
    return PolicyLoss(
        total=per_token.sum() / denominator,
        sums=sums,
        mismatch_max=float(mismatch.max()) if len(mismatch) else 0.0,
        tokens=len(new),
    )
