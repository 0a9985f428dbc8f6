"""The stockroom: its tasks, its tools, its potential and its verifier."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfarm.core.environment import marked_tools
from envfarm.core.errors import ConfigError, ToolError
from envfarm.core.task import Task
from sandboxes.environments.stockroom import Stockroom
from sandboxes.environments.stockroom.environment import FINITE_SIZE, LARGEST_NUMBER
from sandboxes.environments.stockroom.questions import (
    COLOURS,
    FAMILIES,
    HELD_OUT_ITEMS,
    ITEMS,
    NOUNS,
    TRAINING_ITEMS,
    Family,
    Question,
    Shelf,
    draw_question,
)

questions = st.builds(
    draw_question,
    st.integers(0, 2**63 - 1),
    st.sampled_from(FAMILIES),
    st.sampled_from([TRAINING_ITEMS, HELD_OUT_ITEMS]),
)
numbers = st.integers(-10_000, 10_000)


def opened(question: Question) -> Stockroom:
    stockroom = Stockroom()
    stockroom.reset(Task(id="t", data=msgspec.to_builtins(question)))
    return stockroom


def call(stockroom: Stockroom, tool: str, **arguments: Any) -> Any:
    function, _ = marked_tools(stockroom)[tool]
    return function(**arguments)


def test_a_quarter_of_the_items_is_held_out_and_every_word_of_them_occurs_in_training() -> None:
    assert len(ITEMS) == 96
    assert len(HELD_OUT_ITEMS) == 24
    assert not set(HELD_OUT_ITEMS) & set(TRAINING_ITEMS)
    assert {word for item in TRAINING_ITEMS for word in item.split()} == {*COLOURS, *NOUNS}


@pytest.mark.parametrize("split", ["validation", "test"])
def test_finite_splits_hold_as_many_tasks_of_each_family(split: str) -> None:
    families = Counter(task.data["family"] for task in Stockroom().tasks(split))
    assert families == {family.value: FINITE_SIZE // len(FAMILIES) for family in FAMILIES}


@pytest.mark.parametrize(("split", "items"), [("validation", TRAINING_ITEMS), ("test", HELD_OUT_ITEMS)])
def test_a_split_speaks_only_of_its_own_items(split: str, items: tuple[str, ...]) -> None:
    for task in Stockroom().tasks(split):
        assert {task.data["x"], task.data["y"]} <= set(items)
        mentioned = {item for item in ITEMS if item in str(task.prompt)}
        assert mentioned <= set(items)
        assert mentioned


def test_training_tasks_never_end_and_never_name_a_held_out_item() -> None:
    tasks = list(itertools.islice(Stockroom().tasks("train"), 600))
    assert len(tasks) == 600
    assert {task.data["x"] for task in tasks} <= set(TRAINING_ITEMS)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_tasks_are_the_same_every_time_and_survive_json(split: str) -> None:
    once = list(itertools.islice(Stockroom().tasks(split), 50))
    assert once == list(itertools.islice(Stockroom().tasks(split), 50))
    assert msgspec.json.decode(msgspec.json.encode(once), type=list[Task]) == once
    assert len({task.id for task in once}) == 50


def test_no_task_is_in_two_splits() -> None:
    stockroom = Stockroom()
    seen: set[str] = set()
    for split in ("train", "validation", "test"):
        shelves = {json.dumps(task.data) for task in itertools.islice(stockroom.tasks(split), FINITE_SIZE)}
        assert not seen & shelves
        seen |= shelves


def test_an_unknown_split_is_refused_with_the_list_of_those_there_are() -> None:
    with pytest.raises(ConfigError, match="train, validation, test"):
        Stockroom().tasks("holdout")


def test_the_first_message_is_the_question_that_the_task_announces() -> None:
    stockroom = Stockroom()
    for task in stockroom.tasks("test"):
        assert stockroom.reset(task) == task.prompt


def test_a_task_holds_its_whole_shelf_whatever_the_seed_of_its_group() -> None:
    task = next(iter(Stockroom().tasks("test")))
    one, other = Stockroom(), Stockroom()
    one.seed, other.seed = 1, 2
    one.reset(task)
    other.reset(msgspec.structs.replace(task, seed=99))
    assert [one.quantity(item) for item in ITEMS] == [other.quantity(item) for item in ITEMS]


@settings(deadline=None, max_examples=60)
@given(questions)
def test_following_the_needed_calls_leads_to_full_progress_and_the_right_answer(question: Question) -> None:
    stockroom = opened(question)
    calls = question.needed(Shelf(question.shelf))
    assert 2 <= len(calls) + 1 <= 4
    last = None
    for done, needed in enumerate(calls):
        assert stockroom.progress() == done / len(calls)
        last = call(stockroom, needed.tool, **needed.arguments)
    assert stockroom.progress() == 1.0
    assert stockroom.verify() == 0.0
    stockroom.answer(last)
    assert stockroom.verify() == 1.0


@settings(deadline=None, max_examples=60)
@given(questions, numbers)
def test_only_the_right_answer_is_complete(question: Question, value: int) -> None:
    stockroom = opened(question)
    stockroom.answer(value)
    assert stockroom.verify() == float(value == question.answer(Shelf(question.shelf)))


@settings(deadline=None, max_examples=60)
@given(questions, st.data())
def test_progress_never_falls_and_a_repeated_call_adds_nothing(question: Question, data: st.DataObject) -> None:
    stockroom = opened(question)
    calls = [(c.tool, c.arguments) for c in question.needed(Shelf(question.shelf))]
    calls += [("price", {"item": "red cups"}), ("add", {"a": 1, "b": 2}), ("clock", {}), ("weather", {"city": "Oslo"})]
    before = stockroom.progress()
    for tool, arguments in data.draw(st.lists(st.sampled_from(calls), max_size=8)):
        call(stockroom, tool, **arguments)
        after = stockroom.progress()
        assert 0.0 <= before <= after <= 1.0
        call(stockroom, tool, **arguments)
        assert stockroom.progress() == after
        before = after


@settings(deadline=None)
@given(questions, numbers, numbers)
def test_arithmetic_is_exact_and_blind_to_order(question: Question, a: int, b: int) -> None:
    stockroom = opened(question)
    assert stockroom.add(a, b) == stockroom.add(b, a) == a + b
    assert stockroom.multiply(a, b) == stockroom.multiply(b, a) == a * b
    assert stockroom.compare(a, b) == stockroom.compare(b, a) == max(a, b)


def test_either_order_of_two_numbers_counts_as_the_needed_result() -> None:
    question = draw_question(3, Family.WORTH, TRAINING_ITEMS)
    stockroom = opened(question)
    units, price = stockroom.quantity(question.x), stockroom.price(question.x)
    assert stockroom.progress() == 2 / 3
    stockroom.multiply(price, units)
    assert stockroom.progress() == 1.0


def test_an_unknown_item_is_answered_with_a_short_error_and_is_no_progress() -> None:
    stockroom = opened(draw_question(1, Family.COUNT, TRAINING_ITEMS))
    for look_up in (stockroom.quantity, stockroom.price):
        with pytest.raises(ToolError, match=r"^error: no such item$"):
            look_up("purple cows")
    assert stockroom.progress() == 0.0


def test_numbers_too_large_to_write_are_refused() -> None:
    stockroom = opened(draw_question(1, Family.COUNT, TRAINING_ITEMS))
    with pytest.raises(ToolError, match="too large"):
        stockroom.multiply(LARGEST_NUMBER, 2)


def test_distractors_answer_and_help_with_nothing() -> None:
    stockroom = opened(draw_question(1, Family.SUM, TRAINING_ITEMS))
    assert (stockroom.weather("Paris"), stockroom.ring_bell(), stockroom.clock()) == ("sunny", "ding", "noon")
    assert stockroom.progress() == 0.0


def test_a_reset_forgets_the_episode_before() -> None:
    question = draw_question(5, Family.COUNT, TRAINING_ITEMS)
    stockroom = opened(question)
    stockroom.answer(stockroom.quantity(question.x))
    assert (stockroom.progress(), stockroom.verify()) == (1.0, 1.0)
    stockroom.reset(Task(id="t", data=msgspec.to_builtins(question)))
    assert (stockroom.progress(), stockroom.verify()) == (0.0, 0.0)


def test_only_answer_ends_the_episode() -> None:
    assert [name for name, (_, mark) in marked_tools(Stockroom).items() if mark.ends] == ["answer"]
