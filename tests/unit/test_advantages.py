"""Advantages: what must hold for any rewards, and the numbers of small examples by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfarm.core.errors import ConfigError
from trainer_bridge.advantages import (
    batch_mean,
    dr_grpo,
    episode_return,
    estimate,
    gae,
    grpo,
    reward_to_go,
    rloo,
    turn_level,
)

reward = st.floats(-10, 10).map(lambda x: round(x, 3))
episode = st.lists(reward, min_size=1, max_size=6)
episode_with_gaps = st.lists(st.one_of(st.none(), reward), min_size=1, max_size=6)
group = st.lists(episode, min_size=2, max_size=8)
returns = st.lists(reward, min_size=2, max_size=16).map(np.array)
KINDS = ["turn", "grpo", "drgrpo", "rloo", "gae", "batch"]


@settings(deadline=None, max_examples=60)
@given(returns, st.floats(-5, 5))
def test_a_constant_added_to_every_return_changes_no_advantage(values, shift):
    for estimator in (grpo, dr_grpo, rloo, batch_mean):
        np.testing.assert_allclose(estimator(values + shift), estimator(values), atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(returns)
def test_advantages_of_a_group_have_zero_mean(values):
    for estimator in (grpo, dr_grpo, rloo, batch_mean):
        assert abs(estimator(values).mean()) < 1e-6


@settings(deadline=None, max_examples=60)
@given(returns, st.floats(0.5, 20))
def test_grpo_with_std_does_not_depend_on_the_scale_of_rewards(values, scale):
    if values.std() > 0.1:
        np.testing.assert_allclose(grpo(values * scale), grpo(values), rtol=1e-2, atol=1e-3)


@settings(deadline=None, max_examples=60)
@given(returns)
def test_rloo_is_the_return_minus_the_mean_of_the_others(values):
    expected = [v - np.delete(values, i).mean() for i, v in enumerate(values)]
    np.testing.assert_allclose(rloo(values), expected, atol=1e-9)


@settings(deadline=None, max_examples=60)
@given(group)
def test_turn_level_advantages_have_zero_mean_at_every_step(rewards):
    advantages = turn_level(rewards, std=False)
    for k in range(max(map(len, rewards))):
        assert abs(sum(a[k] for a in advantages if len(a) > k)) < 1e-6


@settings(deadline=None, max_examples=60)
@given(group)
def test_turn_level_of_one_step_episodes_is_grpo(rewards):
    one_step = [[sum(r)] for r in rewards]
    flat = np.array([r[0] for r in one_step])
    np.testing.assert_allclose(np.concatenate(turn_level(one_step)), grpo(flat), atol=1e-9)


@settings(deadline=None, max_examples=60)
@given(group, st.floats(0.5, 1.0))
def test_gae_without_a_critic_and_lambda_one_is_turn_level(rewards, gamma):
    for a, b in zip(gae(rewards, gamma=gamma, lam=1.0), turn_level(rewards, gamma=gamma, std=False), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(group, st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(0, 2**31))
def test_gae_satisfies_its_recursion_for_any_critic(rewards, gamma, lam, seed):
    generator = np.random.default_rng(seed)
    values = [generator.normal(size=len(r)) for r in rewards]
    for r, v, a in zip(rewards, values, gae(rewards, values, gamma=gamma, lam=lam), strict=True):
        for k in range(len(r)):
            last = k + 1 == len(r)
            delta = r[k] + (0.0 if last else gamma * v[k + 1]) - v[k]
            assert a[k] == pytest.approx(delta + (0.0 if last else gamma * lam * a[k + 1]), abs=1e-9)


def test_gae_with_lambda_zero_is_the_one_step_error_of_the_critic():
    (advantages,) = gae([[1.0, 2.0]], [np.array([0.5, 0.25])], gamma=0.9, lam=0.0)
    np.testing.assert_allclose(advantages, [1.0 + 0.9 * 0.25 - 0.5, 2.0 - 0.25])


@settings(deadline=None, max_examples=60)
@given(group, st.integers(0, 2**31), st.floats(-2, 2))
def test_potential_based_shaping_telescopes_and_changes_no_episode_advantage(rewards, seed, start):
    """F = Phi(s') - Phi(s), Phi = 0 at the end: every member starts in the same state, so all returns shift alike."""
    generator = np.random.default_rng(seed)
    shaped = []
    for r in rewards:
        potential = np.concatenate([[start], generator.normal(size=len(r) - 1), [0.0]])
        shaped.append([x + d for x, d in zip(r, np.diff(potential), strict=True)])
    plain = np.array([episode_return(r) for r in rewards])
    np.testing.assert_allclose(np.array([episode_return(r) for r in shaped]), plain - start, atol=1e-6)
    for estimator in (dr_grpo, rloo):
        np.testing.assert_allclose(
            estimator(np.array([episode_return(r) for r in shaped])), estimator(plain), atol=1e-6
        )


@settings(deadline=None, max_examples=60)
@given(episode_with_gaps, st.floats(0.0, 1.0))
def test_reward_to_go_discounts_measured_rewards_and_is_absent_when_none_follows(rewards, gamma):
    for k, value in enumerate(reward_to_go(rewards, gamma)):
        ahead = [(j, r) for j, r in enumerate(rewards[k:]) if r is not None]
        if ahead:
            assert value == pytest.approx(sum(gamma**j * r for j, r in ahead), abs=1e-6)
        else:
            assert np.isnan(value)


@settings(deadline=None, max_examples=60)
@given(st.lists(episode_with_gaps, min_size=2, max_size=6), st.sampled_from(KINDS))
def test_an_episode_of_which_nothing_was_measured_moves_nobody(rewards, kind):
    """Absent is not zero: with it or without it, the others get the same advantages."""
    measured = [r for r in rewards if any(x is not None for x in r)]
    if len(measured) < 2:
        return
    alone = estimate(kind, measured)
    with_blank = estimate(kind, [*measured, [None, None]])
    assert np.isnan(with_blank[-1]).all()
    for a, b in zip(alone, with_blank, strict=False):
        np.testing.assert_allclose(a, b, atol=1e-9)


def test_a_missing_reward_is_not_a_zero():
    np.testing.assert_allclose(dr_grpo(np.array([episode_return(r) for r in ([1.0], [None], [3.0])])), [-1, np.nan, 1])
    assert np.isnan(turn_level([[1.0, None], [2.0, 5.0]])[0][1])


def test_turn_level_credits_a_step_only_with_what_came_after_it():
    good, bad = turn_level([[1.0, 0.0], [0.0, 0.0]], std=False)
    np.testing.assert_allclose(good, [0.5, 0.0])
    np.testing.assert_allclose(bad, [-0.5, 0.0])


@pytest.mark.parametrize("kind", KINDS)
def test_members_that_are_equally_good_have_no_advantage(kind):
    for a in estimate(kind, [[0.5, 1.0]] * 4):
        np.testing.assert_allclose(a, 0.0, atol=1e-12)


def test_rloo_has_no_baseline_for_a_lone_member():
    assert np.isnan(rloo(np.array([1.0]))).all()


def test_an_unknown_estimator_is_named_with_those_there_are():
    with pytest.raises(ConfigError, match=r"no advantage named 'ppo'.*rloo"):
        estimate("ppo", [[1.0]])  # type: ignore[arg-type]


def test_a_critic_must_value_every_step():
    with pytest.raises(ConfigError, match="one value per step"):
        gae([[1.0, 2.0]], [np.array([0.0])])
