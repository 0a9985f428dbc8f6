"""SGLang's HTTP bodies in the farm's terms: what is sent, and what is read of the answers.

Weight versions are text there and integers in the farm. Text that is no integer (a server started without
``--weight-version 0``) is an error, since staleness could not be told.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from envfarm.core.engine import Generation, SamplingParams, VersionSpan
from envfarm.core.errors import EngineError


class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _FinishReason(msgspec.Struct):
    type: str
    message: str | None = None
    matched: int | str | None = None


class _Meta(msgspec.Struct):
    """What the farm reads of ``meta_info``. An aborted request that never ran may lack nearly all of it."""

    finish_reason: _FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    weight_version: str | int | None = None
    weight_versions: list[_Span] | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None


class Reply(msgspec.Struct):
    """Answer to ``/generate``."""

    meta_info: _Meta
    output_ids: list[int] | None = None


class ModelInfo(msgspec.Struct):
    """What the farm reads of ``/model_info``."""

    model_path: str = ""
    weight_version: str | int = ""


class _Load(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0


class Lengths(msgspec.Struct):
    """What ``/server_info`` tells of lengths: SGLang's context is null where it is the model's own."""

    context_length: int | None = None
    max_req_input_len: int | None = None


class Loads(msgspec.Struct):
    """What the farm reads of ``/v1/loads``."""

    loads: list[_Load] = []


class Updated(msgspec.Struct):
    """Answer to ``/update_weights_from_disk``."""

    success: bool
    message: str = ""


def to_version(text: str | int, *, url: str) -> int:
    """A weight version as the farm counts them."""
    try:
        return int(text)
    except ValueError:
        raise EngineError(
            f"{url} serves weight version {text!r}; expected a whole number: start the server with --weight-version 0"
        ) from None


def to_generation(reply: Reply, *, url: str) -> Generation:
    """SGLang's answer in the farm's terms."""
    meta = reply.meta_info
    ids = reply.output_ids or []
    reason = meta.finish_reason or _FinishReason(type="abort", message="the engine gave no reason")
    scored = meta.output_token_logprobs or []
    if reason.type == "abort":  # cut at a token: what has no log-probability yet does not count
        ids = ids[: len(scored)]
    logprobs = [pair[0] for pair in scored]
    if [pair[1] for pair in scored] != ids or None in logprobs:
        raise EngineError(
            f"{url} returned {len(ids)} tokens with {len(scored)} log-probabilities that do not belong to them; "
            "it must serve return_logprob"
        )
    return Generation(
        output_ids=ids,
        logprobs=[p for p in logprobs if p is not None],
        finish=_finish(reason.type, url),
        finish_detail=reason.message or ("" if reason.matched is None else str(reason.matched)),
        versions=_spans(meta, len(ids), url),
        prompt_tokens=meta.prompt_tokens,
        cached_tokens=meta.cached_tokens,
    )


def _finish(kind: str, url: str) -> Literal["stop", "length", "abort"]:
    if kind == "stop":
        return "stop"
    if kind == "length":
        return "length"
    if kind == "abort":
        return "abort"
    raise EngineError(f"{url} finished a request with {kind!r}; expected stop, length or abort")


def _spans(meta: _Meta, total: int, url: str) -> tuple[VersionSpan, ...]:
    if total == 0:
        return ()
    if meta.weight_versions:
        return tuple(
            VersionSpan(to_version(s.version, url=url), s.start, min(s.end, total))
            for s in meta.weight_versions
            if s.start < total
        )
    if meta.weight_version is None:
        raise EngineError(f"{url} does not tell the weight version of its answer; it is too old for the farm")
    return (VersionSpan(to_version(meta.weight_version, url=url), 0, total),)


def sampling_params(params: SamplingParams) -> dict[str, Any]:
    """``sampling_params`` of ``/generate``. Stop tokens stay in ``output_ids``, since they were sampled too."""
    wanted: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop_token_ids": params.stop_token_ids,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    if params.sampling_seed is not None:
        wanted["sampling_seed"] = params.sampling_seed
    return wanted
