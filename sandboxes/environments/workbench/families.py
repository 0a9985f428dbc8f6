"""Families of tasks: a right program, faults that can be worked into it, and how arguments for its functions are drawn.

A fault is a pair: a text that stands once in the program, and what stands there instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import msgspec

Arguments = list[Any]
Draw = Callable[[Random], Arguments]

_FOLDER = Path(__file__).parent / "programs"
_WORDS = ("ant", "Bee", "cat", "dog", "elk", "of", "a", "river", "Stone", "in", "garden", "the", "lamp", "it")


class Fault(msgspec.Struct, frozen=True):
    """What stands in the right program, and what stands there in the faulty one."""

    right: str
    wrong: str


class Family(msgspec.Struct, frozen=True):
    """One program. ``draws``: by function, arguments that JSON can carry."""

    name: str
    faults: tuple[Fault, ...]
    draws: Mapping[str, Draw]

    @property
    def source(self) -> str:
        """The right program."""
        return (_FOLDER / f"{self.name}.py").read_text()


def _intervals(draw: Random) -> list[list[int]]:
    firsts = [draw.randrange(30) for _ in range(draw.randint(0, 6))]
    return [[first, first + draw.randrange(6)] for first in firsts]


def _entries(draw: Random) -> list[list[Any]]:
    return [[draw.choice(("rent", "food", "books")), draw.randint(-9, 9) * 50] for _ in range(draw.randint(0, 8))]


def _text(draw: Random) -> str:
    words = [draw.choice(_WORDS) for _ in range(draw.randint(0, 10))]
    return draw.choice((" ", ", ", "-")).join(words) + draw.choice(("", ".", "!"))


def _time(draw: Random, first: int = 0, last: int = 1439) -> str:
    minute = draw.randint(first // 5, last // 5) * 5
    return f"{minute // 60:02}:{minute % 60:02}"


def _meeting(draw: Random) -> list[str]:
    begin = draw.randint(16, 24)
    return [f"{half // 2:02}:{half % 2 * 30:02}" for half in (begin, begin + draw.randint(1, 4))]


def _grid(draw: Random) -> list[list[int]]:
    width = draw.randint(1, 4)
    return [[draw.randrange(10) for _ in range(width)] for _ in range(draw.randint(1, 4))]


def _cell(draw: Random) -> Arguments:
    grid = _grid(draw)
    return [grid, draw.randrange(len(grid)), draw.randrange(len(grid[0]))]


def _run_text(draw: Random) -> str:
    return "".join(draw.choice("abc") * draw.randint(1, 3) for _ in range(draw.randint(0, 5)))


def _runs(draw: Random) -> list[list[Any]]:
    return [[draw.choice("xyz"), draw.randint(1, 4)] for _ in range(draw.randint(0, 5))]


def _digits(draw: Random) -> str:
    digits = [draw.randrange(10) for _ in range(draw.randint(3, 11))]
    if draw.random() < 0.7:  # mostly numbers that are right
        doubled = [d * 2 - 9 * (d > 4) if place % 2 == 0 else d for place, d in enumerate(reversed(digits))]
        digits.append(-sum(doubled) % 10)
    return "".join(map(str, digits))


def _year(draw: Random) -> int:
    """Whole centuries are what faults are about."""
    return draw.choice((draw.randint(1600, 2400), draw.randint(16, 24) * 100))


def _date(draw: Random) -> list[int]:
    month = draw.randint(1, 12)
    return [_year(draw), month, draw.choice((1, 15, 28) if month == 2 else (1, 15, 30))]


def _last_day(draw: Random) -> list[int]:
    """The last day of a month."""
    return [_year(draw), *draw.choice(([12, 31], [12, 31], [4, 30], [10, 31], [2, 28], [11, 30]))]


def _items(draw: Random) -> list[list[Any]]:
    names = draw.sample(("bolt", "gear", "lamp", "rope", "tape"), draw.randint(0, 5))
    return [[name, draw.choice((0, 1, 4, 5, 6, 20)), draw.choice((99, 150, 250))] for name in names]


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "intervals",
            (
                Fault("first <= merged[-1][1] + 1", "first <= merged[-1][1]"),
                Fault("max(merged[-1][1], last)", "last"),
                Fault("in sorted(intervals)", "in intervals"),
                Fault("last - first + 1 for", "last - first for"),
                Fault("in merge(intervals))", "in intervals)"),
                Fault("right[0] - 1]", "right[0]]"),
            ),
            {"merge": lambda d: [_intervals(d)], "count": lambda d: [_intervals(d)], "gaps": lambda d: [_intervals(d)]},
        ),
        Family(
            "ledger",
            (
                Fault("totals.get(account, 0) + cents", "cents"),
                Fault("if total < 0]", "if total <= 0]"),
                Fault("in sorted(found)]", "in sorted(found, reverse=True)]"),
                Fault("least = min(least, running)", "least = min(least, cents)"),
                Fault(
                    "[share + 1] * rest + [share] * (people - rest)", "[share] * (people - rest) + [share + 1] * rest"
                ),
                Fault("[share] * (people - rest)", "[share] * people"),
            ),
            {
                "balances": lambda d: [_entries(d)],
                "overdrawn": lambda d: [_entries(d)],
                "lowest": lambda d: [_entries(d), d.choice(("rent", "food"))],
                "split_bill": lambda d: [d.randint(0, 2000), d.randint(1, 7)],
            },
        ),
        Family(
            "words",
            (
                Fault("char.lower() if", "char if"),
                Fault("if char.isalpha() else", "if char != '-' else"),
                Fault("(-item[1], item[0])", "(item[1], item[0])"),
                Fault("(-item[1], item[0])", "-item[1]"),
                Fault("ranked[:number]", "ranked[: number - 1]"),
                Fault("if len(word) > len(best)", "if len(word) >= len(best)"),
                Fault("if len(word) > 2)", "if len(word) > 3)"),
            ),
            {
                "words": lambda d: [_text(d)],
                "most_common": lambda d: [_text(d), d.randint(1, 4)],
                "longest": lambda d: [_text(d)],
                "acronym": lambda d: [_text(d)],
            },
        ),
        Family(
            "timetable",
            (
                Fault("int(hours) * 60", "int(hours) * 100"),
                Fault("{minute % 60:02}", "{minute % 60}"),
                Fault("minutes(one[0]) < minutes(other[1]) and", "minutes(one[0]) <= minutes(other[1]) and"),
                Fault("first - now >= least", "first - now > least"),
                Fault("now = max(now, last)", "now = last"),
                Fault("if minutes(end) - now >= least:", "if minutes(end) - now > least:"),
            ),
            {
                "minutes": lambda d: [_time(d)],
                "written": lambda d: [d.randrange(1440)],
                "clash": lambda d: [_meeting(d), _meeting(d)],
                "free": lambda d: [
                    [_meeting(d) for _ in range(d.randint(0, 4))],
                    "08:00",
                    d.choice(("12:30", "13:00", "14:30")),
                    d.choice((30, 60, 90)),
                ],
            },
        ),
        Family(
            "grid",
            (
                Fault("for column in zip(*grid, strict=True)", "for column in grid"),
                Fault("zip(*grid[::-1], strict=True)", "zip(*grid, strict=True)"),
                Fault("min(len(grid), row + 2)", "min(len(grid), row + 1)"),
                Fault("max(0, column - 1)", "column"),
                Fault("if (r, c) != (row, column)", "if r != row and c != column"),
                Fault("value == max(row) and", "value == min(row) and"),
            ),
            {
                "transposed": lambda d: [_grid(d)],
                "turned": lambda d: [_grid(d)],
                "neighbours": _cell,
                "peaks": lambda d: [_grid(d)],
            },
        ),
        Family(
            "codes",
            (
                Fault("runs[-1][1] += 1", "runs[-1][1] = 2"),
                Fault("char * length for", "char for"),
                Fault("place % 2 == 1", "place % 2 == 0"),
                Fault("value - 9 if value > 9", "value - 10 if value > 9"),
                Fault("+ shift) % 26 + 97)", "+ shift) + 97)"),
                Fault('"a" <= char <= "z"', '"a" < char < "z"'),
            ),
            {
                "encode": lambda d: [_run_text(d)],
                "decode": lambda d: [_runs(d)],
                "luhn": lambda d: [_digits(d)],
                "caesar": lambda d: [_run_text(d) + d.choice((" z", "-a", "!")), d.randint(1, 25)],
            },
        ),
        Family(
            "calendar_days",
            (
                Fault(" or year % 400 == 0)", ")"),
                Fault("(year % 100 != 0 or", "(year % 100 == 0 or"),
                Fault("in (4, 6, 9, 11)", "in (4, 6, 8, 11)"),
                Fault("range(1, month)", "range(1, month + 1)"),
                Fault("if day < month_length(year, month)", "if day <= month_length(year, month)"),
                Fault("[year + 1, 1, 1]", "[year, 1, 1]"),
            ),
            {
                "is_leap": lambda d: [_year(d)],
                "month_length": lambda d: [_year(d), d.randint(1, 12)],
                "day_of_year": lambda d: [_date(d)],
                "following": lambda d: [d.choice((_date, _last_day))(d)],
            },
        ),
        Family(
            "store",
            (
                Fault("sum(units * price for", "sum(price for"),
                Fault("if units < least]", "if units <= least]"),
                Fault("[name, least - units]", "[name, least]"),
                Fault("90 if units >= 10 else", "90 if units > 10 else"),
                Fault("if units > 0 and", "if units >= 0 and"),
                Fault("price < lowest)", "price <= lowest)"),
            ),
            {
                "value": lambda d: [_items(d)],
                "reorder": lambda d: [_items(d), d.choice((4, 5, 6))],
                "discounted": lambda d: [d.randint(20, 999), d.choice((1, 9, 10, 10, 11, 99, 100, 250))],
                "cheapest": lambda d: [_items(d)],
            },
        ),
    )
}
HELD_OUT = ("calendar_days", "store")
"""Families that only the split ``test`` has."""
