"""One generation in the engine: what was asked, and what has been produced so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

MAX_STOP_IDS = 32


@dataclass(slots=True, eq=False)
class Request:
    """``tokens`` and ``logprobs`` grow when the request leaves its row (done or retracted); they are one per token.

    ``spans`` are (version, index of the first output token sampled under it). ``context`` travels with the request
    for whoever waits for it.
    """

    rid: str
    key: str
    tokens: NDArray[np.int64]
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stops: tuple[int, ...]
    seed: int
    context: Any = None
    prompt_length: int = 0
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    spans: list[tuple[str, int]] = field(default_factory=list)
    cached_tokens: int | None = None
    retractions: int = 0
    finish: Literal["", "stop", "length", "abort"] = ""
    detail: str = ""
    created_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def output_ids(self) -> list[int]:
        """Sampled token ids."""
        ids: list[int] = self.tokens[self.prompt_length :].tolist()
        return ids

    @property
    def output_logprobs(self) -> list[float]:
        """One log-probability per sampled token."""
        values: list[float] = self.logprobs.tolist()
        return values

    def version_spans(self) -> list[tuple[str, int, int]]:
        """(version, start, end) over the output tokens, without gaps; none when nothing was sampled."""
        if not self.spans:
            return []
        total = len(self.tokens) - self.prompt_length
        bounds = [*(start for _, start in self.spans[1:]), total]
        spans = [(version, start, end) for (version, start), end in zip(self.spans, bounds, strict=True)]
        return [span for span in spans if span[2] > span[1]]
