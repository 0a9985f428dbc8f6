"""What a store has: items are lists [name, units, price in cents]."""

from __future__ import annotations

from typing import Any


def value(items: list[list[Any]]) -> int:
    """Return what all units together cost, in cents."""
    return sum(units * price for _, units, price in items)


def reorder(items: list[list[Any]], least: int) -> list[list[Any]]:
    """Return [name, units to order] for every item of which fewer than ``least`` units are there."""
    return [[name, least - units] for name, units, _ in items if units < least]


def discounted(price: int, units: int) -> int:
    """Return the cost of some units: 10 percent less from 10 units on, 20 percent less from 100 on, in whole cents.

    Fractions of a cent are dropped from the cost of all units together.
    """
    percent = 80 if units >= 100 else 90 if units >= 10 else 100
    return price * units * percent // 100


def cheapest(items: list[list[Any]]) -> str:
    """Return the name of the cheapest item of which there is at least one unit, of equal ones the first; or ''."""
    best = ""
    lowest = -1
    for name, units, price in items:
        if units > 0 and (lowest < 0 or price < lowest):
            best, lowest = name, price
    return best
