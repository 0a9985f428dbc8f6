"""What the policy side asks of an inference engine, in the terms of SGLang's ``/generate``.

Weight versions travel as text there; the farm publishes counters, so here they are integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

PauseMode = Literal["abort", "retract", "in_place"]
"""What becomes of running requests: ended; kept without their caches, computed again; kept as they are."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Temperature 0 is greedy. ``stop_token_ids`` end the answer and stay in ``output_ids``."""

    max_new_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    sampling_seed: int | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``routing_key`` is the episode: its turns go to the engine that has its prefix cached."""

    rid: str
    input_ids: Sequence[int]
    sampling: SamplingParams
    routing_key: str = ""


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens ``start`` (inclusive) to ``end`` (exclusive) were sampled under ``version``."""

    version: int
    start: int
    end: int


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled token ids with the log-probability of each (log-softmax after temperature, before top-p and top-k)."""

    output_ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length", "abort"]
    finish_detail: str = ""
    versions: tuple[VersionSpan, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Live state of an engine. ``context_tokens``: most tokens of a prompt and its answer together, if it tells."""

    url: str
    model_path: str
    version: int
    healthy: bool = True
    running: int = 0
    waiting: int = 0
    tokens_generated: int = 0
    context_tokens: int | None = None


class Engine(Protocol):
    """One engine, or a pool that looks like one. Implemented by ``envfarm.inference``."""

    async def generate(self, request: GenerateRequest, *, timeout: float) -> Generation:
        """Sample one continuation. Raises ``EngineError``; an abort is a ``Generation`` with ``finish='abort'``."""
        ...

    async def abort(self, rid: str) -> None:
        """End the request if it still runs; partial tokens come back from :meth:`generate`."""
        ...

    async def update_weights_from_disk(self, path: str, *, version: int, timeout: float) -> None:
        """Serve the weights under ``path`` (safetensors) as ``version`` from the next token on, everywhere."""
        ...

    async def status(self) -> Sequence[EngineStatus]:
        """State of every engine."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...
