"""What can be asked in the stockroom: items, shelves, families of questions, and the calls that answer each.

Everything here is a pure function of a seed, so that a task is the same on every machine.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

COLOURS = ("red", "green", "blue", "black", "white", "brown", "pink", "grey")
NOUNS = ("apples", "pears", "pens", "books", "cups", "lamps", "boxes", "keys", "ropes", "shoes", "hats", "coins")
ITEMS = tuple(f"{colour} {noun}" for colour in COLOURS for noun in NOUNS)

# Every fourth diagonal of the colour x noun square: each word occurs in training, 24 of the 96 combinations never do.
HELD_OUT_ITEMS = tuple(
    f"{colour} {noun}" for i, colour in enumerate(COLOURS) for j, noun in enumerate(NOUNS) if (i + j) % 4 == 0
)
TRAINING_ITEMS = tuple(item for item in ITEMS if item not in HELD_OUT_ITEMS)

MAX_UNITS = 49
MAX_PRICE = 9


class Shelf:
    """Units and unit price of every item, drawn from ``seed``."""

    def __init__(self, seed: int) -> None:
        rng = Random(seed)
        self.units = {item: rng.randint(1, MAX_UNITS) for item in ITEMS}
        self.prices = {item: rng.randint(1, MAX_PRICE) for item in ITEMS}


class Family(enum.StrEnum):
    """Kinds of questions. All but ``count`` need two or more results combined."""

    COUNT = "count"
    SUM = "sum"
    COST = "cost"
    MORE = "more"
    PAIR = "pair"
    WORTH = "worth"


FAMILIES = tuple(Family)

WORDINGS: dict[Family, tuple[str, ...]] = {
    Family.COUNT: ("How many {x} are on the shelf?", "How many {x} do we have?"),
    Family.SUM: ("How many {x} and {y} are on the shelf?", "How many {x} and {y} do we have together?"),
    Family.COST: ("What do {n} {x} cost?", "What is the total price of {n} {x}?"),
    Family.MORE: ("What is the larger count, {x} or {y}?", "How many do we have of the more common, {x} or {y}?"),
    Family.PAIR: ("What is the price of {x} plus the price of {y}?",),
    Family.WORTH: ("What is the whole stock of {x} worth?",),
}


class Call(msgspec.Struct, frozen=True):
    """A tool with its arguments by name."""

    tool: str
    arguments: dict[str, Any]

    @property
    def key(self) -> tuple[str, tuple[Any, ...]]:
        """Equal for calls that obtain the same thing: the order of two numbers does not matter."""
        return self.tool, tuple(sorted(self.arguments.values()))


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One question: its family, the two items it may speak of, a number of pieces, and the seed of its shelf."""

    family: Family
    x: str
    y: str
    n: int
    wording: int
    shelf: int

    @property
    def text(self) -> str:
        """What the customer asks."""
        return WORDINGS[self.family][self.wording].format(x=self.x, y=self.y, n=self.n)

    def needed(self, shelf: Shelf) -> tuple[Call, ...]:
        """The calls whose results the answer needs, in a possible order."""
        x, y, n = self.x, self.y, self.n
        units, prices = shelf.units, shelf.prices
        match self.family:
            case Family.COUNT:
                return (_quantity(x),)
            case Family.SUM:
                return _quantity(x), _quantity(y), _combine("add", units[x], units[y])
            case Family.COST:
                return _price(x), _combine("multiply", n, prices[x])
            case Family.MORE:
                return _quantity(x), _quantity(y), _combine("compare", units[x], units[y])
            case Family.PAIR:
                return _price(x), _price(y), _combine("add", prices[x], prices[y])
            case Family.WORTH:
                return _quantity(x), _price(x), _combine("multiply", units[x], prices[x])

    def answer(self, shelf: Shelf) -> int:
        """The only right answer."""
        x, y, n = self.x, self.y, self.n
        units, prices = shelf.units, shelf.prices
        match self.family:
            case Family.COUNT:
                return units[x]
            case Family.SUM:
                return units[x] + units[y]
            case Family.COST:
                return n * prices[x]
            case Family.MORE:
                return max(units[x], units[y])
            case Family.PAIR:
                return prices[x] + prices[y]
            case Family.WORTH:
                return units[x] * prices[x]


def draw_question(seed: int, family: Family, items: Sequence[str]) -> Question:
    """The question of ``family`` about two different ``items`` that follows from ``seed``."""
    rng = Random(seed)
    x, y = rng.sample(items, 2)
    return Question(
        family=family,
        x=x,
        y=y,
        n=rng.randint(2, 9),
        wording=rng.randrange(len(WORDINGS[family])),
        shelf=rng.getrandbits(48),
    )


def _quantity(item: str) -> Call:
    return Call("quantity", {"item": item})


def _price(item: str) -> Call:
    return Call("price", {"item": item})


def _combine(tool: str, a: int, b: int) -> Call:
    return Call(tool, {"a": a, "b": b})
