"""Attention over rows of different lengths, as an attention function of transformers.

Every active row adds at least one token per forward pass. All tokens of a pass lie in one packed sequence: first the
*extras* (appended prompt tokens but the last of each row's chunk), then one *final* token per row, in the order of the
slots. Linear layers thus see no padding. The finals attend in one batched call over the contiguous slots; the extras
of each row in a call of their own.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name
from transformers import AttentionInterface

from envfarm.core.errors import ConfigError
from envfarm.inference.embedded.kv import KVBuffer

NAME = "envfarm_ragged"


class Extra(NamedTuple):
    """A run of ``length`` extras: packed index ``first``, for ``slot``, at positions ``start`` and on."""

    first: int
    length: int
    slot: int
    start: int
    mask: torch.Tensor | None  # (1, 1, length, start + length), additive; None when the run starts the row


@dataclass(slots=True)
class Batch:
    """One forward pass. ``rows`` finals close the packed sequence of T tokens.

    Shapes: ``input_ids`` and ``positions`` (1, T), ``slots`` (T,), ``mask`` (rows, 1, 1, longest), additive.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rows: int
    longest: int
    mask: torch.Tensor
    extras: list[Extra]


class _Pass(threading.local):
    batch: Batch | None = None
    kv: KVBuffer | None = None


_pass = _Pass()


class forward_pass:  # noqa: N801 - used as a verb: ``with forward_pass(batch, kv): model(...)``
    """What :func:`ragged_attention` works on while a model runs in this thread."""

    def __init__(self, batch: Batch, kv: KVBuffer) -> None:
        self._batch, self._kv = batch, kv

    def __enter__(self) -> None:
        _pass.batch, _pass.kv = self._batch, self._kv

    def __exit__(self, *_: object) -> None:
        _pass.batch = _pass.kv = None


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - transformers' signature; always None for this name
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Store the pass's keys and values, attend, and return (1, T, heads, head_dim).

    ``query`` is (1, heads, T, head_dim), ``key`` and ``value`` (1, kv_heads, T, head_dim).
    """
    for unsupported in ("sliding_window", "softcap", "s_aux"):
        if options.get(unsupported) is not None:
            raise ConfigError(
                f"the embedded engine cannot run {type(module).__name__}: its attention uses {unsupported}; "
                "serve this model with SGLang"
            )
    batch, kv = _pass.batch, _pass.kv
    if batch is None or kv is None:
        raise RuntimeError(f"{NAME} attention runs only inside forward_pass()")
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = kv.write(layer, batch.slots, batch.positions[0], key[0], value[0])
    finals = _attend_finals(query, keys, values, batch, scaling)
    if not batch.extras:
        return finals.unsqueeze(0), None
    parts = [_attend_extra(query, keys, values, extra, scaling) for extra in batch.extras]
    return torch.cat([*parts, finals]).unsqueeze(0), None


def _attend_finals(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Batch, scaling: float | None
) -> torch.Tensor:
    heads, total, width = query.shape[1:]
    rows, kv_heads = batch.rows, keys.shape[1]
    # Query heads that share a kv head become query rows of it: no copy of the keys per head, and faster on a CPU.
    q = query[0, :, total - rows :].transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, width)
    out = F.scaled_dot_product_attention(
        q,
        keys[:rows, :, : batch.longest],
        values[:rows, :, : batch.longest],
        attn_mask=batch.mask,
        scale=scaling,
    )
    return out.reshape(rows, heads, -1)


def _attend_extra(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, extra: Extra, scaling: float | None
) -> torch.Tensor:
    end = extra.start + extra.length
    out = F.scaled_dot_product_attention(
        query[:, :, extra.first : extra.first + extra.length],
        keys[extra.slot : extra.slot + 1, :, :end],
        values[extra.slot : extra.slot + 1, :, :end],
        attn_mask=extra.mask,
        is_causal=extra.mask is None,
        scale=scaling,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


AttentionInterface.register(NAME, ragged_attention)
