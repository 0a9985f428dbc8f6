"""Projects of the workbench: every fault shows, in the test and in what decides, and is the only one."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from envfarm.core.errors import ConfigError
from sandboxes.environments.workbench.environment import SPLITS, Bench, Workbench
from sandboxes.environments.workbench.families import FAMILIES, HELD_OUT
from sandboxes.environments.workbench.judge import _equal
from sandboxes.environments.workbench.project import called, loaded, project

FAULTS = [(name, number) for name, family in FAMILIES.items() for number in range(len(family.faults))]


def fails(source, case):
    try:
        return called(loaded(source), case.function, case.arguments) != case.result
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return True


@pytest.mark.parametrize(("family", "fault"), FAULTS)
def test_every_fault_shows_in_the_test_and_in_what_decides(family, fault):
    source, worked_in = FAMILIES[family].source, FAMILIES[family].faults[fault]
    assert source.count(worked_in.right) == 1
    for seed in range(3):
        made = project(family, fault, seed)
        assert made.source != source
        assert 1 <= sum(fails(made.source, case) for case in made.shown) < len(made.shown)
        assert sum(fails(made.source, case) for case in made.deciding) >= 4
        assert not any(fails(source, case) for case in made.shown + made.deciding)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_decides_covers_every_function_and_nothing_that_the_test_shows(family):
    made = project(family, 0, 11)
    keys = [msgspec.json.encode((case.function, case.arguments)) for case in made.shown + made.deciding]
    assert len(set(keys)) == len(keys)
    assert {case.function for case in made.deciding} == set(FAMILIES[family].draws)


def test_a_project_is_the_same_for_the_same_seed():
    project.cache_clear()
    first = project("words", 1, 5)
    project.cache_clear()
    assert msgspec.json.encode(project("words", 1, 5)) == msgspec.json.encode(first)
    assert project("words", 1, 6).shown != first.shown


def test_tasks_are_the_same_each_time_and_held_out_programs_come_only_in_the_test_split():
    bench = Workbench()
    for split in SPLITS:
        first, again = (list(itertools.islice(bench.tasks(split), 60)) for _ in range(2))
        assert first == again
        assert len({task.id for task in first}) == len(first)
        families = {msgspec.convert(task.data, Bench).family for task in first}
        assert families <= set(HELD_OUT) if split == "test" else not families & set(HELD_OUT)
    with pytest.raises(ConfigError, match="no split 'exam'"):
        bench.tasks("exam")


@pytest.mark.parametrize(
    ("value", "expected", "equal"),
    [
        (1, 1, True),
        (True, 1, False),
        (1.0, 1, False),
        ([1, [2]], [1, [2]], True),
        ([1], [1, 2], False),
        (None, 0, False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"b": 1}, False),
        ("1", 1, False),
    ],
)
def test_values_are_equal_only_when_they_are_of_one_kind(value, expected, equal):
    assert _equal(value, expected) is equal
