"""The policy loss: clipping, sampler correction, KL estimate, token-level normalisation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_bridge.losses import Clip, clipped_surrogate, k3, policy_loss, truncated_importance

torch.set_num_threads(1)
logprob = st.floats(-8, -0.01)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_of(new, old, sampler, advantages, *, clip=Clip(), denominator=None):  # noqa: B008 - frozen
    return policy_loss(
        new=new,
        old=old,
        sampler=sampler,
        advantages=advantages,
        entropy=torch.zeros_like(new.detach()),
        clip=clip,
        denominator=denominator or len(new),
    )


def test_on_policy_the_gradient_is_the_plain_policy_gradient():
    new = tensor(-1.0, -2.0, -3.0).requires_grad_()
    advantages = tensor(1.0, -2.0, 0.5)
    loss_of(new, new.detach(), new.detach(), advantages).total.backward()
    torch.testing.assert_close(new.grad, -advantages / 3)


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [
        (1.3, 1.0, False),
        (1.27, 1.0, True),
        (0.79, 1.0, True),
        (0.79, -1.0, False),
        (0.81, -1.0, True),
        (1.3, -1.0, True),
    ],
)
def test_clipping_is_asymmetric_and_stops_only_moves_that_went_far_enough(ratio, advantage, moves):
    new = tensor(math.log(ratio)).requires_grad_()
    clipped_surrogate(new, tensor(0.0), tensor(advantage), 0.2, 0.28).sum().backward()
    assert (new.grad.abs().item() > 0) == moves


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(logprob, logprob, st.floats(-3, 3)), min_size=1, max_size=8))
def test_clipping_never_promises_more_than_the_plain_surrogate(tokens):
    new, old, advantages = (torch.tensor(x, dtype=torch.float64) for x in zip(*tokens, strict=True))
    plain = -(new - old).exp() * advantages
    assert (clipped_surrogate(new, old, advantages, 0.2, 0.28) >= plain - 1e-9).all()


def test_the_sampler_correction_is_the_ratio_up_to_its_cap():
    old, sampler = tensor(-1.0, -1.0, -1.0), tensor(-1.0, -1.5, -3.0)
    torch.testing.assert_close(truncated_importance(old, sampler, 2.0), tensor(1.0, math.exp(0.5), 2.0))


def test_the_sampler_correction_makes_the_expected_gradient_that_of_the_trainer():
    """Sum over the vocabulary, weighed by the sampler's probabilities: exact expectation, no sampling noise."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    sampler = torch.log_softmax(logits.detach() + 0.2 * torch.randn(6, generator=generator, dtype=torch.float64), 0)
    rewards = torch.randn(6, generator=generator, dtype=torch.float64)
    policy = torch.log_softmax(logits, 0)
    (wanted,) = torch.autograd.grad(-(policy.exp() * rewards).sum(), logits, retain_graph=True)
    ratio = clipped_surrogate(policy, policy.detach(), rewards, 0.2, 0.28)
    weights = truncated_importance(policy.detach(), sampler, 1e9)
    (found,) = torch.autograd.grad((sampler.exp() * weights * ratio).sum(), logits)
    torch.testing.assert_close(found, wanted)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(logprob, logprob), min_size=1, max_size=8))
def test_k3_is_never_negative_and_zero_only_where_the_policies_agree(pairs):
    new, sampler = (torch.tensor(x, dtype=torch.float64) for x in zip(*pairs, strict=True))
    assert (k3(new, sampler) >= 0).all()
    torch.testing.assert_close(k3(new, new), torch.zeros_like(new))


def test_k3_estimates_the_divergence_without_bias():
    p, q = torch.tensor([0.5, 0.3, 0.2]).log().double(), torch.tensor([0.2, 0.5, 0.3]).log().double()
    torch.testing.assert_close((p.exp() * k3(q, p)).sum(), (p.exp() * (p - q)).sum())


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 9), st.integers(0, 2**31))
def test_any_split_of_the_tokens_sums_to_the_same_loss_and_gradient(cut, seed):
    generator = torch.Generator().manual_seed(seed)
    new, old, sampler, advantages = torch.randn(4, 10, generator=generator, dtype=torch.float64)
    whole = new.clone().requires_grad_()
    loss_of(whole, old, sampler, advantages, denominator=10).total.backward()
    parts = new.clone().requires_grad_()
    for s in (slice(0, cut), slice(cut, 10)):
        loss_of(parts[s], old[s], sampler[s], advantages[s], denominator=10).total.backward()
    torch.testing.assert_close(parts.grad, whole.grad)


def test_metrics_are_sums_over_tokens_of_clipping_mismatch_and_divergence():
    old, sampler = tensor(-1.0, -1.0), tensor(-1.1, -1.0)
    found = loss_of(old + tensor(math.log(1.5), 0.0), old, sampler, tensor(1.0, 1.0))
    assert found.sums["clip_fraction"] == 1.0
    assert found.sums["mismatch"] == pytest.approx(0.1)
    assert found.mismatch_max == pytest.approx(0.1)
    assert found.tokens == 2


def test_without_the_correction_the_ratio_is_taken_against_the_sampler():
    old, sampler = tensor(-1.0), tensor(-1.0 - math.log(1.5))
    found = loss_of(old.clone().requires_grad_(), old, sampler, tensor(1.0), clip=Clip(tis=None))
    assert found.total.item() == pytest.approx(-1.28)


def test_a_rank_without_tokens_has_a_loss_of_zero_that_can_be_differentiated():
    empty = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    found = loss_of(empty, empty.detach(), empty.detach(), empty.detach(), denominator=7)
    found.total.backward()
    assert found.total.item() == 0.0
    assert found.mismatch_max == 0.0
