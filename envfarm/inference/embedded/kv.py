"""Keys and values of every row, in buffers that are allocated once and touched only as far as rows grow."""

from __future__ import annotations

import math

import numpy as np
import torch


class KVBuffer:
    """Two tensors of shape (layers, slots, kv_heads, context, head_dim).

    Memory is virtual until written: pages of the positions that no row reached cost nothing.
    """

    def __init__(
        self, *, layers: int, slots: int, kv_heads: int, context: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        shape = (layers, slots, kv_heads, context, head_dim)
        self.keys = _untouched_zeros(shape, dtype)
        self.values = _untouched_zeros(shape, dtype)
        self._layers = [(self.keys[i], self.values[i]) for i in range(layers)]

    @staticmethod
    def row_bytes(*, layers: int, kv_heads: int, context: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one slot when its whole context is used."""
        return 2 * layers * kv_heads * context * head_dim * dtype.itemsize

    def write(
        self, layer: int, slots: torch.Tensor, positions: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store (kv_heads, T, head_dim) at ``(slots[t], positions[t])``; returns the layer's two buffers."""
        keys, values = self._layers[layer]
        keys[slots, :, positions] = key.transpose(0, 1)
        values[slots, :, positions] = value.transpose(0, 1)
        return keys, values

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot to another."""
        if length > 0 and source != target:
            self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
            self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def clear(self, slot: int) -> None:
        """Zero a slot, so that numbers that are not finite cannot reach its next row."""
        self.keys[:, slot] = 0
        self.values[:, slot] = 0

    def swap(self, a: int, length_a: int, b: int, length_b: int) -> None:
        """Exchange two slots of which ``length_a`` and ``length_b`` positions are in use."""
        if length_a == 0:
            self.copy(b, a, length_b)
        elif length_b == 0:
            self.copy(a, b, length_a)
        else:
            longest = max(length_a, length_b)
            for buffer in (self.keys, self.values):
                held = buffer[:, a, :, :longest].clone()
                buffer[:, a, :, :longest] = buffer[:, b, :, :longest]
                buffer[:, b, :, :longest] = held


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that the kernel provides page by page on first use; ``torch.zeros`` would write, and so hold, them all.

    Zeros, not empty: a masked position weighs 0, and 0 times a NaN left in fresh memory is NaN.
    """
    data = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)
