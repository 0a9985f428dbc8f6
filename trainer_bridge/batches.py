"""From trajectories and advantages to padded arrays: rows, minibatches, micro-batches under a token budget, ranks.

Pure numpy. A *row* is one segment of a trajectory. Only tokens that the policy sampled, that are predicted by an
earlier token, and whose step has an advantage are *trained*; everything else is context.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from envfarm.core.trajectory import Segment, Trajectory


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One token sequence of length n. ``positions`` [m] index its trained tokens (each >= 1, ascending).

    ``logprobs`` (the sampler's), ``advantages`` and ``versions`` [m] belong to those tokens.
    """

    trajectory_id: str
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    versions: NDArray[np.int32]

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return len(self.token_ids)

    @property
    def trained(self) -> int:
        """Tokens that are trained."""
        return len(self.positions)


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What one forward pass gets: B right-padded rows of at most L tokens, and N trained tokens among them.

    ``input_ids`` [B, L]; ``select`` [B, L] is true at the N positions whose hidden states predict the trained tokens;
    ``targets``, ``logprobs``, ``advantages``, ``versions`` [N] belong to the tokens predicted there, row by row.
    """

    input_ids: NDArray[np.int64]
    select: NDArray[np.bool_]
    targets: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    versions: NDArray[np.int32]

    @property
    def trained(self) -> int:
        """Tokens that are trained."""
        return len(self.targets)


class Minibatch(msgspec.Struct, frozen=True, kw_only=True):
    """One optimiser step of one rank. ``denominator``: trained tokens of the minibatch over *all* ranks."""

    micro_batches: tuple[MicroBatch, ...]
    denominator: int


def rows_of(trajectory: Trajectory, advantages: NDArray[np.float64]) -> list[Row]:
    """Rows of one trajectory, one per segment that has anything to train on.

    ``advantages`` [steps] is indexed by step; a NaN there leaves the step's tokens out, as does a sampled token
    without a finite log-probability or without a step.
    """
    return [row for segment in trajectory.segments if (row := _row(trajectory.id, segment, advantages)) is not None]


def split(rows: Sequence[Row], parts: int, generator: np.random.Generator) -> list[list[Row]]:
    """At most ``parts`` non-empty minibatches of nearly equal size, drawn at random without replacement."""
    order = generator.permutation(len(rows))
    size = -(-len(rows) // max(1, parts))
    return [[rows[i] for i in order[at : at + size]] for at in range(0, len(rows), max(1, size))]


def balanced(rows: Sequence[Row], ranks: int) -> list[list[Row]]:
    """Rows per rank, longest first to the rank with the fewest tokens so far (Graham 1969, LPT)."""
    shares: list[list[Row]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for row in sorted(rows, key=lambda r: -r.length):
        load, rank = heapq.heappop(loads)
        shares[rank].append(row)
        heapq.heappush(loads, (load + row.length, rank))
    return shares


def micro_batches(rows: Sequence[Row], *, tokens: int, trained: int) -> list[MicroBatch]:
    """Rows sorted by length and cut so that no micro-batch pads to over ``tokens`` or trains over ``trained``.

    A row that alone is over a bound gets a micro-batch of its own. ``trained`` bounds the logits, which are
    ``trained x vocabulary``.
    """
    out: list[MicroBatch] = []
    current: list[Row] = []
    for row in sorted(rows, key=lambda r: r.length):
        over_tokens = (len(current) + 1) * row.length > tokens
        over_trained = sum(r.trained for r in current) + row.trained > trained
        if current and (over_tokens or over_trained):
            out.append(padded(current))
            current = []
        current.append(row)
    if current:
        out.append(padded(current))
    return out


def padded(rows: Sequence[Row]) -> MicroBatch:
    """One micro-batch of ``rows``. Padding is on the right, where causal attention never looks."""
    width = max(row.length for row in rows) - 1  # the last token is only ever predicted
    ids = np.zeros((len(rows), width), np.int64)
    select = np.zeros((len(rows), width), np.bool_)
    for at, row in enumerate(rows):
        ids[at, : row.length - 1] = row.token_ids[:-1]
        select[at, row.positions - 1] = True
    return MicroBatch(
        input_ids=ids,
        select=select,
        targets=np.concatenate([row.token_ids[row.positions].astype(np.int64) for row in rows]),
        logprobs=np.concatenate([row.logprobs for row in rows]),
        advantages=np.concatenate([row.advantages for row in rows]),
        versions=np.concatenate([row.versions for row in rows]),
    )


def minibatch_per_rank(rows: Sequence[Row], ranks: int, *, tokens: int, trained: int) -> list[Minibatch]:
    """One minibatch cut over ``ranks``; every rank gets the same number of micro-batches.

    Sharded models gather their weights together, so each rank must run forward equally often: a rank with fewer
    micro-batches gets fillers that train nothing.
    """
    shares = [micro_batches(share, tokens=tokens, trained=trained) for share in balanced(rows, ranks)]
    most = max(len(share) for share in shares)
    denominator = sum(row.trained for row in rows)
    return [
        Minibatch(micro_batches=(*share, *[_FILLER] * (most - len(share))), denominator=denominator) for share in shares
    ]


def _row(trajectory_id: str, segment: Segment, advantages: NDArray[np.float64]) -> Row | None:
    steps = segment.steps
    known = (steps >= 0) & (steps < len(advantages))
    per_token = np.full(len(steps), np.nan)
    per_token[known] = advantages[steps[known]]
    wanted = (segment.mask == 1) & ~np.isnan(per_token) & np.isfinite(segment.logprobs)
    wanted[:1] = False  # nothing predicts the first token
    positions = np.flatnonzero(wanted)
    if not len(positions):
        return None
    return Row(
        trajectory_id=trajectory_id,
        token_ids=segment.token_ids[: positions[-1] + 1],  # what comes after the last trained token teaches nothing
        positions=positions,
        logprobs=segment.logprobs[positions].astype(np.float32),
        advantages=per_token[positions].astype(np.float32),
        versions=segment.versions[positions],
    )


_NOTHING_F = np.zeros(0, np.float32)
_NOTHING_I = np.zeros(0, np.int64)
_FILLER = MicroBatch(
    input_ids=np.zeros((1, 1), np.int64),
    select=np.zeros((1, 1), np.bool_),
    targets=_NOTHING_I,
    logprobs=_NOTHING_F,
    advantages=_NOTHING_F,
    versions=np.zeros(0, np.int32),
)
