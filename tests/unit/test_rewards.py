"""The five parts: total, bounded, and silent where nothing was measured."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfarm.core.messages import AssistantMessage, Diagnosis, ToolCall, ToolResult, ToolStatus
from envfarm.core.outcome import Outcome, OutcomeKind
from envfarm.core.plugins import load_all
from envfarm.core.rewards import RewardPart, StepContext
from envfarm.core.task import Limits
from rewards.completion import completion_part
from rewards.efficiency import efficiency_part
from rewards.format import format_part
from rewards.progress import progress_part
from rewards.tool import tool_part

unit = st.floats(0.0, 1.0)
results = st.builds(
    ToolResult, call_id=st.just("call_0"), name=st.just("f"), status=st.sampled_from(ToolStatus), content=st.just("")
)
messages = st.builds(
    AssistantMessage,
    content=st.text(max_size=5),
    tool_calls=st.lists(st.just(ToolCall("call_0", "f", "{}")), max_size=4).map(tuple),
    diagnosis=st.sampled_from(Diagnosis),
)
contexts = st.builds(
    StepContext,
    index=st.integers(0, 50),
    limits=st.builds(Limits, steps=st.integers(0, 40)),
    message=messages,
    results=st.lists(results, max_size=4).map(tuple),
    progress_before=st.none() | unit,
    progress_after=st.none() | unit,
    completion=st.none() | unit,
    repeated_calls=st.integers(0, 6),
    sampled_tokens=st.none() | st.integers(0, 1000),
    done=st.booleans(),
    outcome=st.none() | st.builds(Outcome, st.sampled_from(OutcomeKind)),
    signals=st.just({}),
)


def step(**changes) -> StepContext:
    plain = {
        "index": 0,
        "limits": Limits(steps=10),
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
    return StepContext(**(plain | changes))


def graded(diagnosis: Diagnosis, calls: int = 1) -> AssistantMessage:
    made = tuple(ToolCall(f"call_{i}", "f", "{}") for i in range(calls))
    return AssistantMessage(tool_calls=made, diagnosis=diagnosis)


def answered(*statuses: ToolStatus) -> tuple[ToolResult, ...]:
    return tuple(ToolResult(call_id=f"call_{i}", name="f", status=s, content="") for i, s in enumerate(statuses))


@pytest.mark.parametrize("part", [format_part, tool_part, progress_part, efficiency_part, completion_part])
@given(context=contexts)
@settings(deadline=None, max_examples=150)
def test_every_part_is_defined_for_every_step_and_stays_in_its_bounds(part, context):
    value = part(context)
    assert value is None or (math.isfinite(value) and -1.0 <= value <= 1.0)


def test_the_five_parts_are_found_by_entry_point():
    parts = load_all("envfarm.rewards")
    assert {"format", "tool", "progress", "efficiency", "completion"} <= set(parts)
    assert all(isinstance(part, RewardPart) for part in parts.values())


@given(context=contexts)
@settings(deadline=None)
def test_format_and_efficiency_never_pay(context):
    assert format_part(context) <= 0.0
    assert (efficiency_part(context) or 0.0) <= 0.0


def test_format_punishes_broken_syntax_more_than_unfit_arguments_and_good_form_not_at_all():
    value = {d: format_part(step(message=graded(d))) for d in Diagnosis}
    assert value[Diagnosis.OK] == value[Diagnosis.NONE] == 0.0
    assert value[Diagnosis.SYNTAX] == value[Diagnosis.TRUNCATED] == -1.0
    assert -1.0 < value[Diagnosis.SCHEMA] == value[Diagnosis.UNKNOWN_TOOL] < 0.0


def test_tool_is_not_measured_without_calls():
    assert tool_part(step(message=graded(Diagnosis.NONE, calls=0))) is None


def test_tool_weighs_calls_that_ran_against_those_that_did_not():
    ok, error, late = ToolStatus.OK, ToolStatus.ERROR, ToolStatus.TIMEOUT
    message = graded(Diagnosis.OK, calls=2)
    assert tool_part(step(message=message, results=answered(ok, ok))) == 1.0
    assert tool_part(step(message=message, results=answered(ok, error))) == 0.0
    assert tool_part(step(message=message, results=answered(late, error))) == -1.0


def test_a_malformed_call_counts_as_one_that_did_not_run():
    assert tool_part(step(message=graded(Diagnosis.SYNTAX, calls=0))) == -1.0
    assert tool_part(step(message=graded(Diagnosis.SYNTAX), results=answered(ToolStatus.OK))) == 0.0


@pytest.mark.parametrize(("before", "after"), [(None, 0.5), (0.5, None), (None, None)])
def test_progress_is_not_measured_where_a_potential_is_missing(before, after):
    assert progress_part(step(progress_before=before, progress_after=after)) is None


@given(potentials=st.lists(unit, min_size=2, max_size=30), gamma=unit)
@settings(deadline=None)
def test_progress_telescopes_over_an_episode(potentials, gamma):
    pairs = list(itertools.pairwise(potentials))
    parts = [progress_part(step(progress_before=a, progress_after=b), gamma=gamma) for a, b in pairs]
    discounted = sum(gamma**t * part for t, part in enumerate(parts))
    assert discounted == pytest.approx(gamma ** len(pairs) * potentials[-1] - potentials[0], abs=1e-9)


@given(potentials=st.lists(unit, min_size=2, max_size=30))
@settings(deadline=None)
def test_undiscounted_progress_is_the_last_potential_less_the_first(potentials):
    pairs = itertools.pairwise(potentials)
    total = sum(progress_part(step(progress_before=a, progress_after=b)) for a, b in pairs)
    assert total == pytest.approx(potentials[-1] - potentials[0], abs=1e-9)


def test_progress_with_zero_terminal_potential_pays_everything_back_at_the_end():
    end = {"progress_before": 0.7, "progress_after": 1.0, "done": True}
    assert progress_part(step(**end, outcome=Outcome.completed()), terminal_zero=True) == -0.7
    assert progress_part(step(**end, outcome=Outcome.completed())) == pytest.approx(0.3)


def test_a_state_at_which_a_limit_cut_the_episode_is_not_terminal():
    cut = step(progress_before=0.7, progress_after=1.0, done=True, outcome=Outcome.truncated("steps"))
    assert progress_part(cut, terminal_zero=True) == pytest.approx(0.3)


def test_efficiency_charges_repeated_calls_by_their_share():
    message = graded(Diagnosis.OK, calls=2)
    assert efficiency_part(step(message=message)) == 0.0
    assert efficiency_part(step(message=message, repeated_calls=1)) == -0.5
    assert efficiency_part(step(message=message, repeated_calls=2)) == -1.0


def test_efficiency_charges_only_the_second_half_of_the_budget():
    costs = [efficiency_part(step(index=i, message=graded(Diagnosis.OK))) for i in range(10)]
    assert costs[:5] == [0.0] * 5
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == -0.1


def test_a_budget_of_one_step_costs_nothing():
    assert efficiency_part(step(limits=Limits(steps=1), message=graded(Diagnosis.OK))) == 0.0


def test_efficiency_has_nothing_to_measure_in_a_first_message_without_calls():
    assert efficiency_part(step()) is None


def test_completion_is_measured_only_at_the_end():
    assert completion_part(step(completion=1.0)) is None
    assert completion_part(step(completion=1.0, done=True, outcome=Outcome.completed())) == 1.0
    assert completion_part(step(completion=0.25, done=True, outcome=Outcome.truncated("steps"))) == 0.25


def test_completion_that_cannot_be_judged_is_none_and_never_zero():
    assert completion_part(step(done=True, outcome=Outcome.completed())) is None


@pytest.mark.parametrize("outcome", [Outcome.infra_failed("host died"), Outcome.aborted("ctrl-c")])
def test_completion_of_a_broken_episode_says_nothing(outcome):
    assert completion_part(step(completion=0.0, done=True, outcome=outcome)) is None
