"""Tasks of reasoning-gym: repeatable, disjoint between splits, judged by their own scorer."""

import itertools

import pytest

from envfarm.core import plugins
from envfarm.core.errors import ConfigError
from sandboxes.environments.reasoning import FINITE_SIZE, MIX, ReasoningGym

pytest.importorskip("reasoning_gym")


def first(split, count, cls=ReasoningGym):
    return list(itertools.islice(cls().tasks(split), count))


def test_the_mix_takes_its_data_sets_in_turn_and_repeats_itself():
    tasks = first("train", 2 * len(MIX))
    assert [t.data["dataset"] for t in tasks] == [*MIX, *MIX]
    assert len({t.id for t in tasks}) == len(tasks)
    assert tasks == first("train", 2 * len(MIX))


def test_splits_share_no_question():
    cls = plugins.environment("reasoning_gym/chain_sum")
    questions = {split: {t.prompt for t in first(split, 60, cls)} for split in ("train", "validation", "test")}
    assert not questions["train"] & questions["validation"]
    assert not questions["train"] & questions["test"]
    assert not questions["validation"] & questions["test"]
    assert len(list(cls().tasks("test"))) == FINITE_SIZE


@pytest.mark.parametrize("name", MIX)
def test_the_right_answer_scores_one_and_none_scores_nothing(name):
    environment = plugins.environment(f"reasoning_gym/{name}")()
    (task,) = first("train", 1, type(environment))
    assert environment.reset(task) == task.prompt
    assert environment.verify() == 0.0
    environment.answer(str(environment._entry["answer"]))
    assert environment.verify() == 1.0
    environment.reply(f"I think <answer>{environment._entry['answer']}</answer>")
    assert environment.verify() == 1.0
    environment.reply("no idea")
    assert environment.verify() == 0.0


def test_names_choose_data_sets_and_unknown_ones_are_helped():
    cls = plugins.environment("reasoning_gym/gcd, lcm")
    assert [t.data["dataset"] for t in first("train", 2, cls)] == ["gcd", "lcm"]
    with pytest.raises(ConfigError, match="did you mean 'chain_sum'"):
        plugins.environment("reasoning_gym/chain_sun")
    with pytest.raises(ConfigError, match="no split 'exam'"):
        cls().tasks("exam")
    with pytest.raises(ConfigError, match="takes no parameter"):
        plugins.environment("stockroom/large")


def test_an_answer_in_plain_words_is_the_last_line_of_the_message():
    environment = ReasoningGym.configured("chain_sum")()
    task = next(iter(environment.tasks("train")))
    environment.reset(task)
    environment.reply(f"Adding up.\n{environment._entry['answer']}\n")
    assert environment.verify() == 1.0
    environment.reset(task)
    environment.reply("  \n")
    assert environment.verify() == 0.0
