"""The engine's sampler: what it scores, what it may draw, and that neighbours in a batch do not matter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from envfarm.inference.embedded.sampler import sample, uniforms  # noqa: E402

torch.set_num_threads(1)


def draw(logits, *, temperature=1.0, top_p=1.0, top_k=-1, uniform=None, seed=0):
    rows = len(logits)
    if uniform is None:
        uniform = uniforms(np.full(rows, seed, np.uint64), np.arange(rows))
    return sample(
        logits,
        temperature=torch.full((rows,), float(temperature)),
        top_p=torch.full((rows,), float(top_p)),
        top_k=torch.full((rows,), int(top_k), dtype=torch.int64),
        uniform=torch.as_tensor(uniform),
    )


def random_logits(rows, vocab, seed, spread=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_uniform_numbers_lie_in_the_unit_interval_and_depend_on_seed_and_index_alone(seed, index):
    alone = uniforms(np.array([seed], np.uint64), np.array([index]))
    among = uniforms(np.array([1, seed, 2], np.uint64), np.array([9, index, index]))
    assert 0.0 <= alone[0] < 1.0
    assert among[1] == alone[0]


def test_uniform_numbers_are_uniform_over_seeds_and_over_indices():
    for numbers in (
        uniforms(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, np.int64)),
        uniforms(np.full(20_000, 7, np.uint64), np.arange(20_000)),
    ):
        counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
        chi_square = ((counts - 1000) ** 2 / 1000).sum()
        assert chi_square < 45  # 19 degrees of freedom, p = 0.001 at 43.8


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.floats(0.2, 3.0), st.floats(0.1, 1.0), st.integers(1, 20))
def test_log_probabilities_are_log_softmax_after_temperature_before_top_p_and_top_k(seed, temperature, top_p, top_k):
    logits = random_logits(6, 50, seed)
    ids, scored = draw(logits, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    expected = torch.log_softmax(logits / torch.tensor(temperature), -1).gather(-1, ids[:, None])[:, 0]
    torch.testing.assert_close(scored, expected)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 10))
def test_top_k_draws_only_among_the_k_likeliest(seed, k):
    logits = random_logits(40, 30, seed)
    ids, _ = draw(logits, top_k=k, seed=seed)
    allowed = logits.topk(k, -1).indices
    assert (allowed == ids[:, None]).any(1).all()


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.floats(0.05, 0.99))
def test_top_p_draws_only_from_the_smallest_nucleus(seed, top_p):
    logits = random_logits(40, 30, seed)
    ids, _ = draw(logits, top_p=top_p, seed=seed)
    probs = logits.softmax(-1)
    likelier = (probs * (probs > probs.gather(-1, ids[:, None]))).sum(-1)
    assert (likelier <= top_p + 1e-5).all()


def test_temperature_zero_takes_the_likeliest_and_scores_it_at_temperature_one():
    logits = random_logits(8, 30, 1)
    ids, scored = draw(logits, temperature=0.0)
    assert torch.equal(ids, logits.argmax(-1))
    torch.testing.assert_close(scored, logits.log_softmax(-1).amax(-1))


def test_a_greedy_row_leaves_its_neighbours_alone():
    logits = random_logits(3, 30, 2)
    uniform = uniforms(np.arange(3, dtype=np.uint64), np.arange(3))
    alone, _ = draw(logits[2:], temperature=0.5, uniform=uniform[2:])
    mixed, _ = sample(
        logits,
        temperature=torch.tensor([0.0, 1.0, 0.5]),
        top_p=torch.tensor([1.0, 0.3, 1.0]),
        top_k=torch.tensor([-1, 2, -1]),
        uniform=torch.as_tensor(uniform),
    )
    assert mixed[2] == alone[0]


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.full((1000, 5), float("-inf"))
    logits[:, 1] = logits[:, 3] = 0.0
    ids, scored = draw(logits)
    assert set(ids.tolist()) == {1, 3}
    assert torch.isfinite(scored).all()
    for edge in (0.0, 1 - 2.0**-48):
        assert draw(logits[:1], uniform=np.array([edge]))[0].item() in {1, 3}


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(20_000, 4)
    ids, _ = draw(logits, temperature=0.8, seed=3)
    expected = (logits[0] / 0.8).softmax(-1) * 20_000
    chi_square = ((torch.bincount(ids, minlength=4) - expected) ** 2 / expected).sum()
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001
