"""Counting words. A word is a run of letters; upper and lower case are one."""

from __future__ import annotations

from typing import Any


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, in their order."""
    letters = [char.lower() if char.isalpha() else " " for char in text]
    return "".join(letters).split()


def most_common(text: str, number: int) -> list[list[Any]]:
    """Return the most frequent words with their counts, at most ``number``; equally frequent ones by the alphabet."""
    counts: dict[str, int] = {}
    for word in words(text):
        counts[word] = counts.get(word, 0) + 1
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [[word, count] for word, count in ranked[:number]]


def longest(text: str) -> str:
    """Return the longest word, of several the first one; an empty text has the word ''."""
    best = ""
    for word in words(text):
        if len(word) > len(best):
            best = word
    return best


def acronym(text: str) -> str:
    """Return the first letters of all words of more than two letters, in upper case."""
    return "".join(word[0].upper() for word in words(text) if len(word) > 2)
