"""Grows the arrays of a trajectory's segments while its episode runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from envfarm.core.trajectory import Segment

_FIRST = 512
_ENTRY = np.dtype(
    [("token", np.int32), ("mask", np.uint8), ("logprob", np.float32), ("version", np.int32), ("step", np.int32)]
)


class SegmentRecorder:
    """Notes every token the engine saw or produced, in order. Buffers double, so n tokens cost O(n) copies.

    :meth:`context` is pending until the next :meth:`sampled`: what no engine ever saw is not part of the record.
    """

    def __init__(self) -> None:
        self._done: list[Segment] = []
        self._buffer: NDArray[np.void] = np.zeros(_FIRST, _ENTRY)
        self._length = 0
        self._pending: list[int] = []

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start a new segment with a prompt."""
        self._finish()
        self._pending = list(prompt_ids)

    def context(self, token_ids: Sequence[int]) -> None:
        """Tokens that were not sampled, to be seen by the engine with the next request."""
        self._pending += token_ids

    def sampled(self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], step: int) -> None:
        """Tokens that the policy sampled in step ``step``; the three sequences are of one length."""
        self._extend(self._pending, 0, np.nan, -1, -1)
        self._pending = []
        self._extend(token_ids, 1, logprobs, versions, step)

    def segments(self) -> tuple[Segment, ...]:
        """All segments that hold at least one token that an engine saw. Ends the recording."""
        self._finish()
        return tuple(self._done)

    def _extend(
        self,
        token_ids: Sequence[int],
        mask: int,
        logprobs: Sequence[float] | float,
        versions: Sequence[int] | int,
        step: int,
    ) -> None:
        start, end = self._length, self._length + len(token_ids)
        if end > len(self._buffer):
            grown = np.zeros(max(end, 2 * len(self._buffer)), _ENTRY)
            grown[:start] = self._buffer[:start]
            self._buffer = grown
        part = self._buffer[start:end]
        part["token"], part["mask"], part["logprob"] = token_ids, mask, logprobs
        part["version"], part["step"] = versions, step
        self._length = end

    def _finish(self) -> None:
        if self._length:
            entries = self._buffer[: self._length]
            self._done.append(
                Segment(
                    token_ids=entries["token"].copy(),
                    mask=entries["mask"].copy(),
                    logprobs=entries["logprob"].copy(),
                    versions=entries["version"].copy(),
                    steps=entries["step"].copy(),
                )
            )
        self._length = 0
        self._pending = []
