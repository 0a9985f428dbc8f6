"""Days of the Gregorian calendar; a date is a list [year, month, day]."""

from __future__ import annotations


def is_leap(year: int) -> bool:
    """Return whether a year has a 29th of February: every fourth, of whole centuries only every fourth."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def month_length(year: int, month: int) -> int:
    """Return the number of days of a month, 1 to 12."""
    if month == 2:
        return 29 if is_leap(year) else 28
    return 30 if month in (4, 6, 9, 11) else 31


def day_of_year(date: list[int]) -> int:
    """Return the number of a day in its year; the 1st of January has 1."""
    year, month, day = date
    return sum(month_length(year, m) for m in range(1, month)) + day


def following(date: list[int]) -> list[int]:
    """Return the date of the next day."""
    year, month, day = date
    if day < month_length(year, month):
        return [year, month, day + 1]
    if month < 12:
        return [year, month + 1, 1]
    return [year + 1, 1, 1]
