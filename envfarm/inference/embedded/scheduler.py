"""Continuous batching: which requests run, what each forward pass computes, and what changes between two passes.

Synchronous and free of I/O; :mod:`envfarm.inference.embedded.thread` drives it. A change of weights *retracts* what
runs: the tokens stay, their keys and values are dropped and computed again under the new weights.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from envfarm.core.engine import PauseMode
from envfarm.inference.embedded.attention import Batch, Extra
from envfarm.inference.embedded.model import CausalModel, Weights
from envfarm.inference.embedded.request import Request
from envfarm.inference.embedded.rows import Rows
from envfarm.inference.embedded.sampler import sample, uniforms

_PREFILL_SECONDS = 0.1  # decoding rows should not wait longer than this for others' prompts
_PREFILL_TOKENS = (32, 2048)  # bounds of what one pass may prefill


class Counters(msgspec.Struct):
    """Totals since start; read by other threads, written by the engine's."""

    requests: int = 0
    aborted: int = 0
    retracted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    passes: int = 0
    busy_seconds: float = 0.0


class Scheduler:
    """Owns the model, its rows and the waiting queue. One thread may call it."""

    def __init__(self, model: CausalModel, *, slots: int, context: int, version: str) -> None:
        self.model = model
        self.version = version
        self.context = context
        self.rows = Rows(model.new_kv(slots=slots, context=context))
        self.waiting: deque[Request] = deque()
        self.paused = False
        self.counters = Counters()
        self._dtype = self.rows.kv.keys.dtype
        self._budget = 256
        self._columns = np.arange(context, dtype=np.int64)

    @property
    def idle(self) -> bool:
        """Whether :meth:`step` would do nothing."""
        return self.paused or not (self.waiting or self.rows.active)

    # -- what others ask for, between two passes ------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a validated request."""
        self.counters.requests += 1
        self.counters.prompt_tokens += request.prompt_length
        self.waiting.append(request)

    def abort(self, chosen: Callable[[Request], bool], reason: str) -> list[Request]:
        """End the requests that ``chosen`` picks, with the tokens they have."""
        ended = [r for r in self.waiting if chosen(r)]
        if ended:
            self.waiting = deque(r for r in self.waiting if not chosen(r))
        for slot in range(self.rows.active - 1, -1, -1):
            request = self.rows.requests[slot]
            if request is not None and chosen(request):
                ended.append(self.rows.leave(slot, keep=True))
        for request in ended:
            request.finish, request.detail = "abort", reason
        self.counters.aborted += len(ended)
        return ended

    def pause(self, mode: PauseMode) -> list[Request]:
        """Stop at the next token. Returns the requests that this ended (mode ``abort``)."""
        self.paused = True
        if mode == "abort":
            return self.abort(lambda _: True, "generation was paused with mode abort")
        if mode == "retract":
            self._retract()
        return []

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self.paused = False

    def flush(self) -> bool:
        """Forget all cached rows; False, and nothing happens, while requests run or wait."""
        if self.rows.active or self.waiting:
            return False
        self.rows.drop_idle()
        return True

    def swap(self, weights: Weights, version: str) -> None:
        """Serve ``weights`` as ``version`` from the next token on; nothing computed before is used again."""
        self._retract()
        self.rows.drop_idle()
        self.model.swap(weights)
        self.version = version

    def _retract(self) -> None:
        running = [self.rows.leave(slot, keep=False) for slot in range(self.rows.active - 1, -1, -1)]
        for request in running:
            request.retractions += 1
        self.counters.retracted += len(running)
        self.waiting.extendleft(sorted(running, key=lambda r: r.created_at, reverse=True))

    # -- one pass -------------------------------------------------------------------------------------------------

    def step(self) -> list[Request]:
        """Admit what fits, run one forward pass, sample; returns the requests that are done."""
        if self.paused:
            return []
        started, cpu = time.perf_counter(), time.thread_time()
        self._admit()
        if not self.rows.active:
            return []
        batch, counts = self._batch()
        logits = self.model.logits(batch, self.rows.kv)
        done = self._advance(logits, counts)
        seconds = time.perf_counter() - started
        # Its own CPU time: on a busy machine the clock would blame prompts for what others take.
        self._adapt(prefilled=int(counts.sum()) - batch.rows, seconds=time.thread_time() - cpu)
        self.counters.passes += 1
        self.counters.busy_seconds += seconds
        return done

    def _admit(self) -> None:
        held: list[Request] = []
        while self.waiting and self.rows.active < self.rows.slots:
            request = self.waiting.popleft()
            fresh = request.cached_tokens is None
            if not self.rows.admit(request):
                held.append(request)
                continue
            if fresh:
                self.counters.cached_tokens += request.cached_tokens or 0
            if not request.spans or request.spans[-1][0] != self.version:
                request.spans.append((self.version, len(request.logprobs)))
        self.waiting.extendleft(reversed(held))

    def _batch(self) -> tuple[Batch, NDArray[np.int64]]:
        """The next pass, and how many tokens each row gets in it (at least one)."""
        rows, n = self.rows, self.rows.active
        start = rows.cached[:n]
        more = rows.length[:n] - start - 1
        before = np.cumsum(more) - more
        extra = np.clip(self._budget - before, 0, more)
        final = start + extra
        slots = np.arange(n)
        extras: list[Extra] = []
        if extra.any():
            prefilling = np.flatnonzero(extra)
            extras, slots, positions = self._extras(prefilling, start, extra, slots, final)
        else:
            positions = final
        longest = int(final.max()) + 1
        hidden = torch.from_numpy(self._columns[:longest] > final[:, None])
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
        batch = Batch(
            input_ids=torch.from_numpy(rows.ids[slots, positions])[None],
            positions=torch.from_numpy(positions)[None],
            slots=torch.from_numpy(slots),
            rows=n,
            longest=longest,
            mask=mask[:, None, None, :],
            extras=extras,
        )
        return batch, extra + 1

    def _extras(
        self,
        prefilling: NDArray[np.int64],
        start: NDArray[np.int64],
        extra: NDArray[np.int64],
        slots: NDArray[np.int64],
        final: NDArray[np.int64],
    ) -> tuple[list[Extra], NDArray[np.int64], NDArray[np.int64]]:
        runs: list[Extra] = []
        packed_slots, packed_positions = [], []
        first = 0
        for slot in prefilling.tolist():
            begin, count = int(start[slot]), int(extra[slot])
            places = self._columns[begin : begin + count]
            runs.append(Extra(first, count, slot, begin, self._causal(begin, count)))
            packed_slots.append(np.full(count, slot))
            packed_positions.append(places)
            first += count
        return runs, np.concatenate([*packed_slots, slots]), np.concatenate([*packed_positions, final])

    def _causal(self, start: int, count: int) -> torch.Tensor | None:
        if start == 0:
            return None
        hidden = torch.from_numpy(self._columns[: start + count] > self._columns[start : start + count, None])
        return torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))[None, None]

    def _advance(self, logits: torch.Tensor, counts: NDArray[np.int64]) -> list[Request]:
        rows, n = self.rows, len(counts)
        rows.cached[:n] += counts
        ready = np.flatnonzero(rows.cached[:n] == rows.length[:n])
        if len(ready) == 0:
            return []
        if len(ready) < n:
            logits = logits[torch.from_numpy(ready)]
        place = rows.length[ready]
        uniform = uniforms(rows.seed[ready], place - rows.prompt[ready])
        with torch.inference_mode():
            sampled, scored = sample(
                logits,
                temperature=torch.from_numpy(rows.temperature[ready]),
                top_p=torch.from_numpy(rows.top_p[ready]),
                top_k=torch.from_numpy(rows.top_k[ready]),
                uniform=torch.from_numpy(uniform),
            )
        tokens = sampled.numpy()
        rows.ids[ready, place] = tokens
        rows.logprobs[ready, place] = scored.numpy()
        rows.length[ready] += 1
        self.counters.generation_tokens += len(ready)
        stopped = (rows.stops[ready] == tokens[:, None]).any(1)
        broken = ~np.isfinite(rows.logprobs[ready, place])
        over = stopped | broken | (rows.length[ready] >= rows.limit[ready])
        return [  # from the end, since a row that leaves is replaced by the last one
            self._broken(int(ready[i]))
            if broken[i]
            else self._finish(int(ready[i]), int(tokens[i]), stopped=bool(stopped[i]))
            for i in np.flatnonzero(over)[::-1]
        ]

    def _broken(self, slot: int) -> Request:
        request = self.rows.fail(slot)
        request.finish = "abort"
        request.detail = f"weight version {self.version} gives logits that are not finite; the model has diverged"
        self.counters.aborted += 1
        return request

    def _finish(self, slot: int, token: int, *, stopped: bool) -> Request:
        request = self.rows.leave(slot, keep=True)
        request.finish = "stop" if stopped else "length"
        request.detail = str(token) if stopped else ""
        return request

    def _adapt(self, *, prefilled: int, seconds: float) -> None:
        """Keep the cost of prompts bearable for rows that decode, on any model and machine."""
        low, high = _PREFILL_TOKENS
        if prefilled and seconds > _PREFILL_SECONDS:
            self._budget = max(low, self._budget // 2)
        elif prefilled >= self._budget and seconds < _PREFILL_SECONDS / 2:
            self._budget = min(high, self._budget * 2)
