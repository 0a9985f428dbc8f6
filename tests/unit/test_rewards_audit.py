"""The audit flags proxies that rise without completion, and stays quiet otherwise."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.audit import hacking, shift


def run(n=300, *, tool=(0.0, 0.0), completion=(0.5, 0.5), seed=0):
    """Episodes whose means move linearly between the two values given."""
    rng = random.Random(seed)

    def at(ends, i):
        return ends[0] + (ends[1] - ends[0]) * i / (n - 1)

    return [
        {"tool": at(tool, i) + rng.gauss(0, 0.1), "completion": float(rng.random() < at(completion, i))}
        for i in range(n)
    ]


def test_a_proxy_that_rises_while_completion_falls_is_flagged_with_a_remedy():
    (found,) = hacking(run(tool=(0.0, 1.0), completion=(0.5, 0.3)))
    assert found.proxy.part == "tool"
    assert found.proxy.change > 0.5
    assert "lower the weight of tool" in str(found)


def test_a_proxy_that_rises_with_completion_is_not_flagged():
    assert hacking(run(tool=(0.0, 1.0), completion=(0.2, 0.9))) == ()


def test_noise_is_not_flagged():
    assert all(hacking(run(seed=s, completion=(0.5, 0.4))) == () for s in range(20))


def test_a_run_that_was_never_judged_says_nothing():
    episodes = [dict(e, completion=None) for e in run(tool=(0.0, 1.0))]
    assert hacking(episodes) == ()
    assert shift(episodes, "completion") is None


def test_unmeasured_episodes_are_left_out_and_not_counted_as_zero():
    episodes = [{"tool": 1.0 if i % 2 else None} for i in range(120)]
    found = shift(episodes, "tool")
    assert (found.change, found.early, found.late) == (0.0, 20, 20)


@given(st.lists(st.dictionaries(st.sampled_from(["tool", "completion"]), st.none() | st.floats(-1, 1)), max_size=80))
@settings(deadline=None, max_examples=50)
def test_the_audit_is_defined_for_every_record(episodes):
    assert len(hacking(episodes, minimum=2)) <= 1
