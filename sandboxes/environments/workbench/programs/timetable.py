"""Times of one day, written HH:MM, and meetings, each a list [begin, end] of times."""

from __future__ import annotations


def minutes(time: str) -> int:
    """Return the minutes from midnight to a time."""
    hours, rest = time.split(":")
    return int(hours) * 60 + int(rest)


def written(minute: int) -> str:
    """Return a number of minutes from midnight as HH:MM, with two digits each."""
    return f"{minute // 60:02}:{minute % 60:02}"


def clash(one: list[str], other: list[str]) -> bool:
    """Return whether two meetings overlap. One may begin when the other ends."""
    return minutes(one[0]) < minutes(other[1]) and minutes(other[0]) < minutes(one[1])


def free(meetings: list[list[str]], begin: str, end: str, least: int) -> list[list[str]]:
    """Return the times between ``begin`` and ``end`` without a meeting that last at least ``least`` minutes."""
    found = []
    now = minutes(begin)
    for first, last in sorted([minutes(a), minutes(b)] for a, b in meetings):
        if first - now >= least:
            found.append([written(now), written(first)])
        now = max(now, last)
    if minutes(end) - now >= least:
        found.append([written(now), end])
    return found
