"""Sampling of one token per row, reproducible per request whatever else is in the batch.

A token is drawn by inverting the cumulative distribution at a uniform number that depends on nothing but the
request's seed and the index of the token, so neighbours in the batch cannot change it (save through rounding).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def uniforms(seeds: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1 - 2**-48], one per (seed, index): SplitMix64 (Steele et al. 2014) as a counter hash."""
    with np.errstate(over="ignore"):
        z = seeds + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(16)).astype(np.float64) / float(1 << 48)


def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    uniform: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B,) and their log-probabilities (B,) from ``logits`` (B, V).

    Log-probabilities are log-softmax after temperature, before top-p and top-k. Temperature 0 is greedy and scored
    at temperature 1, as SGLang does. ``top_k`` below 1 means all. A NaN among the logits makes the score NaN.
    """
    greedy = temperature <= 0.0
    any_greedy = bool(greedy.any())
    scale = torch.where(greedy, 1.0, temperature) if any_greedy else temperature
    logprobs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    probs = logprobs.exp()
    narrow = ((top_p < 1.0) | (top_k > 0)).nonzero().squeeze(-1)
    if len(narrow):
        probs[narrow] = _narrowed(probs[narrow], top_p[narrow], top_k[narrow])
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    # right=True: the first token whose cumulative mass exceeds the target, so never one of probability zero.
    target = uniform[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    if any_greedy:
        ids = torch.where(greedy, logprobs.argmax(-1), ids)
    return ids, logprobs.gather(-1, ids[:, None]).squeeze(-1)


def _narrowed(probs: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """``probs`` with everything outside the top-k, then outside the nucleus (Holtzman et al. 2020), set to zero."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    rank = torch.arange(probs.shape[-1])
    limit = torch.where(top_k > 0, top_k, probs.shape[-1])
    outside = (rank >= limit[:, None]) | (before > top_p[:, None])
    outside[:, 0] = False
    return torch.zeros_like(probs).scatter_(-1, order, ordered.masked_fill(outside, 0.0))
