"""Run-length codes and check digits."""

from __future__ import annotations

from typing import Any


def encode(text: str) -> list[list[Any]]:
    """Return the runs of a text, each as [character, length]."""
    runs: list[list[Any]] = []
    for char in text:
        if runs and runs[-1][0] == char:
            runs[-1][1] += 1
        else:
            runs.append([char, 1])
    return runs


def decode(runs: list[list[Any]]) -> str:
    """Return the text with these runs."""
    return "".join(char * length for char, length in runs)


def luhn(number: str) -> bool:
    """Return whether the last digit is the check digit of the others by Luhn's formula. Spaces do not count.

    From the right, every second digit is doubled; a double above 9 loses 9; the sum must be a multiple of 10.
    """
    digits = [int(char) for char in number if char != " "]
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = digit * 2 if place % 2 == 1 else digit
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def caesar(text: str, shift: int) -> str:
    """Return the text with its lower-case letters a to z moved on by ``shift``, from z on to a."""
    moved = [chr((ord(char) - 97 + shift) % 26 + 97) if "a" <= char <= "z" else char for char in text]
    return "".join(moved)
