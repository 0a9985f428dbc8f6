"""The stockroom as an environment: nine tools, three splits, a dense potential and a verifier."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec

from envfarm.core.environment import Environment, tool
from envfarm.core.errors import ConfigError, ToolError
from envfarm.core.ids import derived_seed
from envfarm.core.rewards import RewardSettings
from envfarm.core.task import Limits, Task
from sandboxes.environments.stockroom.questions import (
    FAMILIES,
    HELD_OUT_ITEMS,
    TRAINING_ITEMS,
    Call,
    Question,
    Shelf,
    draw_question,
)

SPLIT_ITEMS = {"train": TRAINING_ITEMS, "validation": TRAINING_ITEMS, "test": HELD_OUT_ITEMS}
FINITE_SIZE = 240  # tasks in ``validation`` and in ``test``: 40 of each family
LARGEST_NUMBER = 10**12


class Stockroom(Environment):
    """Answer questions about a shop's stock, using its tools one at a time.

    Most questions need two look-ups and one piece of arithmetic. ``weather``, ``ring_bell`` and ``clock`` are there
    to be left alone. ``train`` never ends; ``test`` speaks only of items that no training task names.
    """

    version = "1"
    system_prompt = "You are a stockroom clerk. Use one tool at a time."
    limits = Limits(steps=8, seconds=120.0, tokens_per_step=48, context_tokens=1024)
    # ``tool`` is measured but pays nothing: it is positive for any call that runs, a distractor's included.
    reward = RewardSettings(weights={"completion": 1.0, "progress": 0.5, "format": 0.1, "efficiency": 0.1})

    def tasks(self, split: str) -> Iterable[Task]:
        """The same tasks in the same order on every machine, all families in turn."""
        if split not in SPLIT_ITEMS:
            raise ConfigError(f"stockroom has no split {split!r} (there is: {', '.join(SPLIT_ITEMS)})")
        indices = itertools.count() if split == "train" else range(FINITE_SIZE)
        return (_task(split, index) for index in indices)

    def reset(self, task: Task) -> str:
        """Fill the shelf and ask the question."""
        question = msgspec.convert(task.data, Question)
        self._shelf = Shelf(question.shelf)
        self._right_answer = question.answer(self._shelf)
        self._needed = {call.key for call in question.needed(self._shelf)}
        self._obtained: set[object] = set()
        self._given_answer: int | None = None
        return question.text

    @tool
    def quantity(self, item: str) -> int:
        """Units of `item` on the shelf."""
        return self._obtain(Call("quantity", {"item": item}), self._look_up(self._shelf.units, item))

    @tool
    def price(self, item: str) -> int:
        """Price of one piece of `item`."""
        return self._obtain(Call("price", {"item": item}), self._look_up(self._shelf.prices, item))

    @tool
    def add(self, a: int, b: int) -> int:
        """Sum of two numbers."""
        return self._obtain(Call("add", {"a": a, "b": b}), a + b)

    @tool
    def multiply(self, a: int, b: int) -> int:
        """Product of two numbers."""
        return self._obtain(Call("multiply", {"a": a, "b": b}), a * b)

    @tool
    def compare(self, a: int, b: int) -> int:
        """The larger of two numbers."""
        return self._obtain(Call("compare", {"a": a, "b": b}), max(a, b))

    @tool(ends=True)
    def answer(self, value: int) -> None:
        """Give the final answer."""
        self._given_answer = value

    @tool
    def weather(self, city: str) -> str:  # noqa: ARG002 - the weather is the same everywhere
        """Weather in `city`."""
        return "sunny"

    @tool
    def ring_bell(self) -> str:
        """Ring the shop's bell."""
        return "ding"

    @tool
    def clock(self) -> str:
        """Time of day."""
        return "noon"

    def progress(self) -> float:
        """Share of the needed results that have been obtained: looked up, or computed from the right numbers."""
        return len(self._needed & self._obtained) / len(self._needed)

    def verify(self) -> float:
        """1.0 for the right answer; 0.0 for a wrong one or none."""
        return 1.0 if self._given_answer == self._right_answer else 0.0

    def _look_up(self, column: dict[str, int], item: str) -> int:
        if item not in column:
            raise ToolError("error: no such item")
        return column[item]

    def _obtain(self, call: Call, result: int) -> int:
        if abs(result) > LARGEST_NUMBER:
            raise ToolError("error: number too large")
        self._obtained.add(call.key)
        return result


def _task(split: str, index: int) -> Task:
    seed = derived_seed("stockroom", split, index)
    question = draw_question(seed, FAMILIES[index % len(FAMILIES)], SPLIT_ITEMS[split])
    return Task(id=f"{split}-{index}", prompt=question.text, seed=seed, data=msgspec.to_builtins(question))
