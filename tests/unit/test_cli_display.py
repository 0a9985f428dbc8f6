"""What people see: curves, rows of trajectories, smallest arguments that fit a schema."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from envfarm.cli.demo_display import Curves, format_value, line, render, spark
from envfarm.cli.environment_check import example
from envfarm.cli.rollout_table import as_row, table
from envfarm.core.messages import Diagnosis, Message
from envfarm.core.outcome import Outcome
from envfarm.core.run import MetricPoint
from envfarm.core.sandbox import Isolation
from envfarm.core.trajectory import Segment, StepRecord, Trajectory
from envfarm.rollout.metrics import part_sums


def point(name: str, value: float) -> MetricPoint:
    return MetricPoint(name=name, step=0, value=value, at=0.0, source="test")


def trajectory(*parts: dict[str, float | None]) -> Trajectory:
    one = np.ones(3, np.int32)
    segment = Segment(
        token_ids=one, mask=one.astype(np.uint8), logprobs=one.astype(np.float32), versions=one, steps=one
    )
    steps = tuple(
        StepRecord(index=i, message=Message(role="assistant"), replies=(), diagnosis=Diagnosis.OK, parts=p, reward=None)
        for i, p in enumerate(parts)
    )
    return Trajectory(
        id="t", run_id="r", group_id="g", group_size=1, member=0, attempt=0, final=True, purpose="collect",
        environment="e@1", split="train", task_id="task-7", seed=0, policy="p", outcome=Outcome.truncated("steps"),
        prompt=(), segments=(segment,), steps=steps, reward=None, catalogue="", isolation=Isolation.NONE,
        started_at=0.0, ended_at=2.0,
    )  # fmt: skip


def shown(renderable: object) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_a_series_without_points_shows_a_dash_and_never_a_zero() -> None:
    text = shown(render(Curves(), stage="starting", seconds=1.0))
    row = next(r for r in text.splitlines() if "KL" in r)
    assert "-" in row
    assert "0" not in row


def test_curves_remember_first_last_peak_and_mean() -> None:
    curves = Curves()
    curves.add(None, [point("a", 1.0), point("a", 5.0), point("a", 3.0)])
    assert (curves.first("a"), curves.last("a"), curves.peak("a"), curves.mean("a")) == (1.0, 3.0, 5.0, 3.0)
    assert curves.first("b") is curves.last("b") is curves.peak("b") is curves.mean("b") is None


def test_an_environments_own_reward_part_gets_a_row() -> None:
    curves = Curves()
    curves.add(None, [point("reward/kindness", 0.25)])
    assert "reward: kindness" in shown(render(curves, stage="training", seconds=1.0))


def test_the_line_for_plain_output_names_stage_and_version() -> None:
    curves = Curves()
    curves.add(None, [point("rollout/success", 0.5)])
    assert "training" in line(curves, stage="training", seconds=3.0)
    assert "50 %" in line(curves, stage="training", seconds=3.0)


def test_success_is_drawn_on_the_scale_from_none_to_all() -> None:
    assert str(spark([0.5, 0.5], (0.0, 1.0))) == "▅▅"
    assert str(spark([0.0, 1.0], (0.0, 1.0))) == "▁█"


def test_a_lucky_report_of_few_episodes_is_smoothed_and_a_measurement_is_not() -> None:
    curves = Curves()
    curves.add(None, [point(name, v) for v in (0.0, 1.0) for name in ("rollout/success", "evaluate/validation")])
    assert curves.shown("rollout/success") == [0.0, 0.5]
    assert curves.shown("evaluate/validation") == [0.0, 1.0]


@given(st.lists(st.floats(-1e6, 1e6), max_size=80))
@settings(deadline=None, max_examples=50)
def test_a_curve_is_never_wider_than_its_column(values: list[float]) -> None:
    assert len(spark(values)) <= 32


@pytest.mark.parametrize(
    ("kind", "text"), [("percent", "12 %"), ("count", "0"), ("small", "0.12"), ("number", "+0.12")]
)
def test_values_read_as_their_kind(kind: str, text: str) -> None:
    assert format_value(0.125, kind) == text


def test_what_rounds_to_nothing_has_no_minus() -> None:
    assert format_value(-0.001, "number") == "+0.00"


def test_parts_are_summed_over_steps_and_unmeasured_ones_stay_unmeasured() -> None:
    sums = part_sums(trajectory({"format": 1.0, "progress": None}, {"format": 0.5, "progress": None}))
    assert sums == {"format": 1.5, "progress": None}


def test_a_row_for_machines_survives_json() -> None:
    row = msgspec.json.decode(msgspec.json.encode(as_row(trajectory({"format": None}))))
    assert row["outcome"] == "truncated(steps)"
    assert row["reward"] is None
    assert row["parts"] == {"format": None}
    assert row["tokens"] == 3


def test_the_table_shows_every_part_and_the_means() -> None:
    text = shown(table([trajectory({"format": 1.0}), trajectory({"own": 2.0})]))
    assert "task-7" in text
    assert "format" in text
    assert "own" in text
    assert "mean" in text


def test_a_part_that_no_episode_measured_takes_no_column_and_the_last_row_holds_means_only() -> None:
    text = shown(table([trajectory({"format": 1.0, "progress": None}), trajectory({"format": 0.0})]))
    assert "progress" not in text
    assert text.splitlines()[-1].split() == ["mean", "1.0", "-", "+0.50", "3.0", "2.0"]


class Inner(msgspec.Struct):
    kind: str
    count: int


class Outer(msgspec.Struct):
    inner: Inner
    many: list[Inner]
    flag: bool
    maybe: int | None = None


def test_the_smallest_example_of_a_schema_fits_it() -> None:
    schema = msgspec.json.schema(Outer)
    root = {**schema["$defs"]["Outer"], "$defs": schema["$defs"]}
    value = example(root)
    assert msgspec.convert(value, Outer).inner.count == 1
