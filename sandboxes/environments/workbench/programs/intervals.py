"""Closed intervals of whole numbers, each a list [first, last]."""

from __future__ import annotations

import itertools


def merge(intervals: list[list[int]]) -> list[list[int]]:
    """Return the fewest intervals that hold the same numbers, sorted.

    Intervals that touch are joined: [1, 2] and [3, 4] become [1, 4].
    """
    merged: list[list[int]] = []
    for first, last in sorted(intervals):
        if merged and first <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], last)
        else:
            merged.append([first, last])
    return merged


def count(intervals: list[list[int]]) -> int:
    """Return how many numbers lie in at least one interval."""
    return sum(last - first + 1 for first, last in merge(intervals))


def gaps(intervals: list[list[int]]) -> list[list[int]]:
    """Return the intervals of numbers that lie between the merged intervals."""
    merged = merge(intervals)
    return [[left[1] + 1, right[0] - 1] for left, right in itertools.pairwise(merged)]
