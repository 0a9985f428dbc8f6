"""Rows, minibatches, micro-batches, ranks: no trained token is lost, doubled or moved."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from envfarm.core.messages import Diagnosis, Message
from envfarm.core.outcome import Outcome
from envfarm.core.sandbox import Isolation
from envfarm.core.trajectory import Segment, StepRecord, Trajectory
from trainer_bridge.batches import Row, balanced, micro_batches, minibatch_per_rank, padded, rows_of, split


def segment(mask, steps, *, logprobs=None, first=10):
    mask, steps = np.array(mask, np.uint8), np.array(steps, np.int32)
    known = np.full(len(mask), -1.0, np.float32) if logprobs is None else np.array(logprobs, np.float32)
    return Segment(
        token_ids=np.arange(first, first + len(mask), dtype=np.int32),
        mask=mask,
        logprobs=np.where(mask == 1, known, np.nan).astype(np.float32),
        versions=np.where(mask == 1, 3, -1).astype(np.int32),
        steps=steps,
    )


def trajectory(*segments):
    step = StepRecord(
        index=0, message=Message(role="assistant"), replies=(), diagnosis=Diagnosis.OK, parts={}, reward=1.0
    )
    return Trajectory(
        id="t",
        run_id="r",
        group_id="g",
        group_size=1,
        member=0,
        attempt=0,
        final=True,
        purpose="train",
        environment="e@1",
        split="train",
        task_id="0",
        seed=0,
        policy="p",
        outcome=Outcome.completed(),
        prompt=(),
        segments=segments,
        steps=(step,),
        reward=1.0,
        catalogue="",
        isolation=Isolation.NONE,
        started_at=0.0,
        ended_at=1.0,
    )


def row(length, positions, name="t"):
    positions = np.array(positions, np.int64)
    return Row(
        trajectory_id=name,
        token_ids=np.arange(1, length + 1, dtype=np.int32),
        positions=positions,
        logprobs=-positions.astype(np.float32),
        advantages=positions.astype(np.float32),
        versions=np.zeros(len(positions), np.int32),
    )


@st.composite
def rows(draw, most=24):
    made = []
    for number in range(draw(st.integers(1, most))):
        length = draw(st.integers(2, 40))
        positions = sorted(draw(st.sets(st.integers(1, length - 1), min_size=1, max_size=length - 1)))
        made.append(row(length, positions, f"t{number}"))
    return made


def tokens_of(micro):
    """Every trained token as (target, log-probability, advantage), checked against the position that predicts it."""
    predicted_by = micro.input_ids[micro.select]
    np.testing.assert_array_equal(predicted_by + 1, micro.targets)  # rows count upwards
    return list(zip(micro.targets.tolist(), micro.logprobs.tolist(), micro.advantages.tolist(), strict=True))


def all_tokens(made):
    return sorted((int(p) + 1, -float(p), float(p)) for r in made for p in r.positions)


def test_each_token_gets_the_advantage_of_its_step():
    t = trajectory(segment([0, 0, 1, 1, 0, 1, 0], [-1, -1, 0, 0, -1, 1, -1]))
    (only,) = rows_of(t, np.array([0.5, -2.0]))
    assert only.positions.tolist() == [2, 3, 5]
    assert only.advantages.tolist() == [0.5, 0.5, -2.0]
    assert only.versions.tolist() == [3, 3, 3]
    assert only.length == 6  # what follows the last trained token is not computed


def test_a_step_without_an_advantage_is_context_and_not_a_zero():
    t = trajectory(segment([0, 1, 0, 1], [-1, 0, -1, 1]))
    (only,) = rows_of(t, np.array([1.0, np.nan]))
    assert only.positions.tolist() == [1]


def test_the_first_token_and_tokens_without_a_logprob_are_never_trained():
    t = trajectory(segment([1, 1, 1], [0, 0, 0], logprobs=[-1.0, np.nan, -2.0]))
    (only,) = rows_of(t, np.array([1.0]))
    assert only.positions.tolist() == [2]


def test_segments_become_rows_of_their_own_and_empty_ones_none():
    t = trajectory(segment([0, 1], [-1, 0]), segment([0, 0], [-1, -1]), segment([0, 1], [-1, 1]))
    assert [r.advantages.tolist() for r in rows_of(t, np.array([1.0, 2.0]))] == [[1.0], [2.0]]


@settings(deadline=None, max_examples=60)
@given(rows(), st.integers(1, 200), st.integers(1, 100))
def test_micro_batches_hold_every_trained_token_once_within_their_budgets(made, tokens, trained):
    cut = micro_batches(made, tokens=tokens, trained=trained)
    assert sorted(t for micro in cut for t in tokens_of(micro)) == all_tokens(made)
    for micro in cut:
        if len(micro.input_ids) > 1:  # a single row may be over
            assert micro.input_ids.size <= tokens
            assert micro.trained <= trained


@settings(deadline=None, max_examples=60)
@given(rows(), st.integers(1, 5), st.integers(0, 100))
def test_minibatches_are_nearly_equal_parts_of_all_rows(made, parts, seed):
    cut = split(made, parts, np.random.default_rng(seed))
    assert sorted(r.trajectory_id for part in cut for r in part) == sorted(r.trajectory_id for r in made)
    assert all(cut)
    assert len(cut) <= parts
    assert max(map(len, cut)) - min(map(len, cut)) <= max(1, len(made) // parts)


def test_the_same_seed_splits_the_same_way():
    made = [row(4, [1, 2], f"t{i}") for i in range(10)]
    first, second = (split(made, 2, np.random.default_rng(7)) for _ in range(2))
    assert [[r.trajectory_id for r in part] for part in first] == [[r.trajectory_id for r in part] for part in second]


@settings(deadline=None, max_examples=60)
@given(rows(), st.integers(1, 4))
def test_ranks_share_the_tokens_to_within_one_row(made, ranks):
    shares = balanced(made, ranks)
    loads = [sum(r.length for r in share) for share in shares]
    assert sorted(r.trajectory_id for share in shares for r in share) == sorted(r.trajectory_id for r in made)
    assert max(loads) - min(loads) <= max(r.length for r in made)


@settings(deadline=None, max_examples=60)
@given(rows(), st.integers(1, 4), st.integers(10, 100))
def test_every_rank_runs_forward_equally_often_and_divides_by_the_same_number(made, ranks, tokens):
    cut = minibatch_per_rank(made, ranks, tokens=tokens, trained=1000)
    assert len({len(part.micro_batches) for part in cut}) == 1
    assert {part.denominator for part in cut} == {sum(r.trained for r in made)}
    assert sorted(t for part in cut for m in part.micro_batches for t in tokens_of(m)) == all_tokens(made)


def test_padding_is_on_the_right_and_never_trained():
    micro = padded([row(3, [2]), row(5, [1, 4])])
    assert micro.input_ids.tolist() == [[1, 2, 0, 0], [1, 2, 3, 4]]
    assert micro.select.tolist() == [[False, True, False, False], [True, False, False, True]]
    assert micro.targets.tolist() == [3, 2, 5]
