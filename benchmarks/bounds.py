"""What figures may be at most: the promises of SPECIFICATION.md that hold on two cores, for ``--bounds``."""

from __future__ import annotations

from collections.abc import Mapping

AT_MOST: Mapping[str, float] = {
    "exec_ratio_to_hand": 1.5,  # promise 20
    "local_plain_open_p50_ms_again": 20.0,  # promise 18
}
TRIES = 3  # a machine is slow for reasons of its own at times, but not three times in a row


def exceeded(figures: Mapping[str, float | str]) -> list[str]:
    """A sentence for each figure above its bound."""
    return [
        f"{name} is {value:.2f}, and {AT_MOST[name]:g} at most is promised"
        for name, value in figures.items()
        if name in AT_MOST and isinstance(value, float) and value > AT_MOST[name]
    ]
