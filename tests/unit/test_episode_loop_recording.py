"""Segments grow turn by turn, and hold exactly what an engine saw or produced."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from envfarm.rollout.recording import SegmentRecorder

ids = st.lists(st.integers(0, 2**31 - 1), max_size=40)
turns = st.lists(st.tuples(ids, st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=400)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=40)
@given(segments=st.lists(turns, min_size=1, max_size=3), unseen=ids)
def test_recorded_arrays_are_the_sequence_of_what_was_given(segments, unseen) -> None:
    recorder, step = SegmentRecorder(), 0
    expected = []
    for turn_list in segments:
        rows = []
        for number, (context, sampled) in enumerate(turn_list):
            if number:
                recorder.context(context)
            else:
                recorder.begin(context)
            recorder.sampled(sampled, [-0.5] * len(sampled), [step] * len(sampled), step)
            rows += [(i, 0, -1, -1) for i in context] + [(i, 1, step, step) for i in sampled]
            step += 1
        expected.append(rows)
    recorder.context(unseen)
    found = recorder.segments()
    assert len(found) == len(expected)
    for segment, rows in zip(found, expected, strict=True):
        columns = zip(segment.token_ids, segment.mask, segment.versions, segment.steps, strict=True)
        assert [tuple(int(v) for v in row) for row in columns] == rows
        assert np.array_equal(np.isnan(segment.logprobs), segment.mask == 0)
        assert (segment.token_ids.dtype, segment.logprobs.dtype) == (np.int32, np.float32)


def test_a_prompt_that_no_engine_saw_leaves_no_segment() -> None:
    recorder = SegmentRecorder()
    recorder.begin([1, 2, 3])
    assert recorder.segments() == ()
