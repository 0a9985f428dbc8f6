"""Composition: every part stored, absent is None, the measured ones weighed, capped and summed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfarm.core.messages import AssistantMessage
from envfarm.core.outcome import Outcome
from envfarm.core.rewards import RewardSettings, StepContext
from envfarm.core.task import Limits
from envfarm.gateway.composition import Compositions

LIMITS = Limits()


def step(**changes):
    fields = {
        "index": 0,
        "limits": LIMITS,
        "message": AssistantMessage(),
        "results": (),
        "progress_before": None,
        "progress_after": None,
        "completion": None,
        "repeated_calls": 0,
        "sampled_tokens": None,
        "done": False,
        "outcome": None,
        "signals": {},
    }
    return StepContext(**{**fields, **changes})


def compose(parts, settings, **changes):
    return Compositions(parts).of(settings)(step(**changes))


def test_parts_are_weighed_capped_and_summed():
    parts = {"a": lambda s: 5.0, "b": lambda s: -5.0, "c": lambda s: 1.0, "idle": lambda s: 9.0}
    weights = RewardSettings(weights={"a": 1.0, "b": 2.0, "c": 0.5}, caps={"a": 2.0, "b": 1.0})
    values, reward = compose(parts, weights)
    assert values == {"a": 5.0, "b": -5.0, "c": 1.0, "idle": 9.0}
    assert reward == 2.0 - 2.0 + 0.5


def test_nothing_measured_is_no_reward_not_zero():
    values, reward = compose({"a": lambda s: None}, RewardSettings(weights={"a": 1.0, "missing": 1.0}))
    assert values == {"a": None}
    assert reward is None


def test_a_measured_zero_is_a_reward_of_zero():
    assert compose({"a": lambda s: 0.0}, RewardSettings(weights={"a": 1.0}))[1] == 0.0


@pytest.mark.parametrize("outcome", [Outcome.infra_failed("x"), Outcome.aborted("y")])
def test_an_outcome_of_the_farms_making_carries_no_part_and_no_reward(outcome):
    values, reward = compose(
        {"a": lambda s: 1.0}, RewardSettings(weights={"a": 1.0}), outcome=outcome, done=True, signals={"s": 2.0}
    )
    assert values == {"a": None, "s": None}
    assert reward is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_part_that_is_not_finite_was_not_measured(bad):
    values, reward = compose({"a": lambda s: bad, "b": lambda s: 1.0}, RewardSettings(weights={"a": 1.0, "b": 1.0}))
    assert values == {"a": None, "b": 1.0}
    assert reward == 1.0


def test_a_part_that_raises_was_not_measured_and_harms_no_other():
    values, reward = compose({"a": lambda s: 1 / 0, "b": lambda s: 1.0}, RewardSettings(weights={"a": 1.0, "b": 1.0}))
    assert values == {"a": None, "b": 1.0}
    assert reward == 1.0


def test_the_environments_own_signal_takes_the_place_of_a_part_of_its_name():
    parts = {"tool": lambda s: 1.0}
    values, reward = compose(parts, RewardSettings(weights={"tool": 1.0}), signals={"tool": 3.0, "extra": None})
    assert values == {"tool": 3.0, "extra": None}
    assert reward == 3.0


def test_gamma_reaches_the_parts_that_ask_for_it():
    def shaped(step, gamma=1.0):
        return gamma

    assert compose({"a": shaped}, RewardSettings(weights={"a": 1.0}, gamma=0.9)) == ({"a": 0.9}, 0.9)


def test_equal_settings_share_one_composition():
    made = Compositions({})
    assert made.of(RewardSettings(weights={"a": 1.0})) is made.of(RewardSettings(weights={"a": 1.0}))
    assert made.of(RewardSettings(weights={"a": 1.0})) is not made.of(RewardSettings(weights={"a": 2.0}))


values = st.dictionaries(st.sampled_from("abcdef"), st.none() | st.floats(-10, 10), max_size=6)


@given(values, st.dictionaries(st.sampled_from("abcdef"), st.floats(-3, 3)), st.floats(0, 5))
@settings(deadline=None, max_examples=100)
def test_a_reward_is_bounded_by_weights_times_caps(measured, weights, cap):
    parts = {name: (lambda s, value=value: value) for name, value in measured.items()}
    chosen = RewardSettings(weights=weights, caps=dict.fromkeys("abcdef", cap))
    stored, reward = Compositions(parts).of(chosen)(step())
    assert stored == measured
    counted = [w for name, w in weights.items() if measured.get(name) is not None]
    assert (reward is None) == (not counted)
    assert abs(reward or 0.0) <= sum(abs(w) * cap for w in counted) + 1e-9
