"""SGLang's HTTP bodies, as far as the embedded engine serves them, and their conversion to and from requests.

Field names and reply shapes are SGLang's. Unknown top-level fields are ignored; unknown or unserved sampling
parameters are refused, since ignoring them would change what is sampled.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np

from envfarm.core.engine import PauseMode
from envfarm.core.errors import ConfigError
from envfarm.inference.embedded.request import MAX_STOP_IDS, Request

_AT_DEFAULT: dict[str, tuple[object, ...]] = {
    "stop": (None, [], ""),
    "min_p": (0.0, None),
    "n": (1, None),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "frequency_penalty": (0.0, None),
    "presence_penalty": (0.0, None),
    "repetition_penalty": (1.0, None),
    "min_new_tokens": (0, None),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
}


class Sampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``sampling_params``. Those in the second block are accepted only at their defaults."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: list[int] | None = None
    sampling_seed: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False

    stop: Any = None
    min_p: Any = 0.0
    n: Any = 1
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    frequency_penalty: Any = 0.0
    presence_penalty: Any = 0.0
    repetition_penalty: Any = 1.0
    min_new_tokens: Any = 0
    logit_bias: Any = None
    custom_params: Any = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """``POST /generate``."""

    input_ids: list[int] | None = None
    sampling_params: Sampling = msgspec.field(default_factory=Sampling)
    rid: str | None = None
    routing_key: str | None = None
    return_logprob: bool = False
    stream: bool = False
    return_routed_experts: bool = False
    top_logprobs_num: int = 0


class AbortBody(msgspec.Struct, kw_only=True):
    """``POST /abort_request``."""

    rid: str = ""
    abort_all: bool = False


class PauseBody(msgspec.Struct, kw_only=True):
    """``POST /pause_generation``."""

    mode: PauseMode = "abort"


class UpdateWeightsBody(msgspec.Struct, kw_only=True):
    """``POST /update_weights_from_disk``.

    ``flush_cache`` is accepted for SGLang's sake: rows of older weights are never reused here, whatever it says.
    """

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    keep_pause: bool = False


def to_request(
    body: GenerateBody, *, rid: str, vocab_size: int, context: int, end_ids: frozenset[int], seed: int
) -> Request:
    """A validated request. Raises :class:`ConfigError` that says what is wrong with the body."""
    for name, value, allowed in (
        ("stream", body.stream, False),
        ("return_routed_experts", body.return_routed_experts, False),
        ("top_logprobs_num", body.top_logprobs_num, 0),
    ):
        if value != allowed:
            raise ConfigError(f"{name}={value!r} is not served by the embedded engine; use SGLang for it")
    tokens = _tokens(body.input_ids, vocab_size)
    sampling = body.sampling_params
    _check_sampling(sampling)
    if len(tokens) + sampling.max_new_tokens > context:
        raise ConfigError(
            f"Requested token count exceeds the maximum context length of {context} tokens: {len(tokens)} from the "
            f"input and {sampling.max_new_tokens} for the answer; shorten the input or max_new_tokens"
        )
    stops = frozenset(sampling.stop_token_ids or ()) | (frozenset() if sampling.ignore_eos else end_ids)
    if len(stops) > MAX_STOP_IDS:
        raise ConfigError(f"{len(stops)} stop token ids; at most {MAX_STOP_IDS} are served")
    return Request(
        rid=rid,
        key=body.routing_key or "",
        tokens=tokens,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stops=tuple(sorted(stops)),
        seed=(seed if sampling.sampling_seed is None else sampling.sampling_seed) & (1 << 64) - 1,
    )


def _tokens(input_ids: list[int] | None, vocab_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    if not input_ids:
        raise ConfigError("input_ids is missing or empty; the embedded engine takes token ids, not text")
    try:
        tokens = np.asarray(input_ids, np.int64)
    except OverflowError as error:
        raise ConfigError(f"input_ids holds a number that is no token id: {error}") from error
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise ConfigError(f"input_ids holds {bad}, out of the model's vocabulary [0, {vocab_size})")
    return tokens


def _check_sampling(sampling: Sampling) -> None:
    for name, defaults in _AT_DEFAULT.items():
        value = getattr(sampling, name)
        if value not in defaults:
            raise ConfigError(f"sampling parameter {name}={value!r} is not served by the embedded engine; use SGLang")
    if sampling.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be at least 1, got {sampling.max_new_tokens}")
    if not 0.0 <= sampling.temperature < float("inf"):
        raise ConfigError(f"temperature must be finite and not negative, got {sampling.temperature}")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ConfigError(f"top_p must be in (0, 1], got {sampling.top_p}")
    if sampling.top_k < 1 and sampling.top_k != -1:
        raise ConfigError(f"top_k must be -1 (all) or at least 1, got {sampling.top_k}")


def to_reply(request: Request, *, return_logprob: bool) -> dict[str, Any]:
    """SGLang's answer to ``/generate``. ``text`` stays empty: the engine has no tokenizer."""
    ids = request.output_ids
    spans = request.version_spans()
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": _finish_reason(request, len(ids)),
        "prompt_tokens": request.prompt_length,
        "completion_tokens": len(ids),
        "cached_tokens": request.cached_tokens or 0,
        "num_retractions": request.retractions,
        "e2e_latency": time.monotonic() - request.created_at,
        "weight_version": spans[-1][0] if spans else (request.spans[-1][0] if request.spans else ""),
        "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in spans],
    }
    if return_logprob:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [
            (logprob, token, None) for logprob, token in zip(request.output_logprobs, ids, strict=True)
        ]
    return {"text": "", "output_ids": ids, "meta_info": meta}


def _finish_reason(request: Request, produced: int) -> dict[str, Any]:
    if request.finish == "stop":
        return {"type": "stop", "matched": int(request.detail)}
    if request.finish == "length":
        return {"type": "length", "length": produced}
    return {"type": "abort", "message": request.detail, "status_code": None, "err_type": None}
