"""A ledger: entries are pairs of an account and an amount in cents; money spent is negative."""

from __future__ import annotations

from typing import Any


def balances(entries: list[list[Any]]) -> dict[str, int]:
    """Return the sum of each account that occurs."""
    totals: dict[str, int] = {}
    for account, cents in entries:
        totals[account] = totals.get(account, 0) + cents
    return totals


def overdrawn(entries: list[list[Any]]) -> list[str]:
    """Return the accounts whose balance is below zero, the deepest first, equal ones by name."""
    found = [(total, account) for account, total in balances(entries).items() if total < 0]
    return [account for _, account in sorted(found)]


def lowest(entries: list[list[Any]], account: str) -> int:
    """Return the lowest balance that the account ever had, counting the 0 that it began with."""
    running = 0
    least = 0
    for name, cents in entries:
        if name == account:
            running += cents
            least = min(least, running)
    return least


def split_bill(cents: int, people: int) -> list[int]:
    """Return the share of each person. Shares differ by at most one cent, larger ones come first."""
    share, rest = divmod(cents, people)
    return [share + 1] * rest + [share] * (people - rest)
