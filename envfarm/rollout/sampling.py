"""One answer from the engine within a time budget: aborted requests go on where they stopped, versions are kept."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Literal

import msgspec

from envfarm.core.deadline import Deadline
from envfarm.core.engine import Engine, GenerateRequest, Generation, SamplingParams
from envfarm.core.errors import DeadlineExceeded, EngineAborted, EngineError, FarmError
from envfarm.core.ids import sampling_seed
from envfarm.rollout.ports import PolicySide

GRACE_SECONDS = 5.0
"""Seconds for an aborted request to bring its partial tokens back."""
MOST_CONTINUATIONS = 16


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy sampled in one turn; ``logprobs`` and ``versions`` have one entry per token.

    ``finish``: ``stop`` (it ended its turn), ``length`` (no more tokens allowed) or ``time`` (the budget ran out).
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Literal["stop", "length", "time"]
    seconds: float


async def within_context(side: PolicySide) -> PolicySide:
    """``side`` with the shortest context of its engines, so that a full context is a limit and no engine's error."""
    if side.context_tokens is not None:
        return side
    try:
        states = await side.engine.status()
    except FarmError:
        return side
    lengths = [state.context_tokens for state in states if state.context_tokens is not None]
    return msgspec.structs.replace(side, context_tokens=min(lengths)) if lengths else side


async def sample_answer(
    engine: Engine, *, rid: str, routing_key: str, input_ids: list[int], sampling: SamplingParams, deadline: Deadline
) -> Answer:
    """Sample one answer to ``input_ids``.

    A request that somebody else aborted (new weights, a draining engine) is sent again with its partial tokens, under
    a seed of its own. Raises :class:`EngineError` and what derives from it, and :class:`DeadlineExceeded` when the
    engine brought no token at all within the budget: that is the farm's fault, not the policy's.
    """
    started = time.monotonic()
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    finish: Literal["stop", "length", "time"] | None = None
    detail = ""
    for turn in range(MOST_CONTINUATIONS):
        request = GenerateRequest(
            rid=f"{rid}.{turn}" if turn else rid,
            input_ids=[*input_ids, *ids],
            sampling=_continued(sampling, turn, len(ids)),
            routing_key=routing_key,
        )
        generation = await _generate(engine, request, deadline)
        ids += generation.output_ids
        logprobs += generation.logprobs
        versions += _versions(generation)
        detail = generation.finish_detail
        finish = _finish(generation, len(ids), sampling, deadline)
        if finish is not None:
            break
    if finish is None:
        raise EngineAborted(f"the engine gave up {MOST_CONTINUATIONS} times: {detail or 'no reason given'}")
    if not ids:
        raise DeadlineExceeded("the engine brought no token within the episode's time budget")
    return Answer(
        token_ids=ids, logprobs=logprobs, versions=versions, finish=finish, seconds=time.monotonic() - started
    )


def _finish(
    generation: Generation, sampled: int, sampling: SamplingParams, deadline: Deadline
) -> Literal["stop", "length", "time"] | None:
    """How the answer ended; ``None``: it goes on."""
    if generation.finish != "abort":
        return generation.finish
    if sampled >= sampling.max_new_tokens:
        return "length"
    return "time" if deadline.expired() else None


def _continued(sampling: SamplingParams, turn: int, sampled: int) -> SamplingParams:
    if not turn:
        return sampling
    seed = sampling.sampling_seed
    return msgspec.structs.replace(
        sampling,
        max_new_tokens=sampling.max_new_tokens - sampled,
        sampling_seed=None if seed is None else sampling_seed(seed, turn),
    )


async def _generate(engine: Engine, request: GenerateRequest, deadline: Deadline) -> Generation:
    """One request. At the deadline it is aborted, and what it has sampled so far comes back."""
    task = asyncio.ensure_future(engine.generate(request, timeout=deadline.remaining() + GRACE_SECONDS))
    try:
        done, _ = await asyncio.wait((task,), timeout=deadline.remaining())
        if not done:
            await _abort(engine, request.rid)
        return await task
    except asyncio.CancelledError:
        await _abort(engine, request.rid)
        raise
    finally:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, FarmError):
                await task


async def _abort(engine: Engine, rid: str) -> None:
    """Best effort: an engine that cannot be told ends the request by its own timeout."""
    with contextlib.suppress(FarmError, TimeoutError):
        async with asyncio.timeout(GRACE_SECONDS):
            await engine.abort(rid)


def _versions(generation: Generation) -> list[int]:
    """Policy version of every output token. Raises :class:`EngineError` when the engine left one without."""
    count = len(generation.output_ids)
    if len(generation.logprobs) != count:
        raise EngineError(f"the engine sent {count} tokens with {len(generation.logprobs)} log-probabilities")
    versions = [-1] * count
    for span in generation.versions:
        versions[span.start : span.end] = [span.version] * len(versions[span.start : span.end])
    if -1 in versions:
        raise EngineError(
            "the engine did not say under which policy version it sampled; start it with a numeric weight version"
        )
    return versions
