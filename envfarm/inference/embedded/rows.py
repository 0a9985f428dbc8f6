"""The rows of the batch: which slot holds which tokens, and which of their keys and values are computed.

Slots ``[0, active)`` run; those behind are *idle* (they keep the tokens of a finished request, for the next turn of
the same episode or for whoever shares a prefix) or empty. Running slots stay contiguous by swapping, so that a
forward pass works on slices. Numbers per row live in arrays: a step costs no Python per row.
"""

from __future__ import annotations

import numpy as np

from envfarm.inference.embedded.kv import KVBuffer
from envfarm.inference.embedded.request import MAX_STOP_IDS, Request

_WORTH_WAITING = 8  # tokens: wait for a row that is computing this much more of the same prefix


class Rows:
    """State of all slots. Not thread-safe: one thread runs the engine."""

    def __init__(self, kv: KVBuffer) -> None:
        self.kv = kv
        slots, context = kv.keys.shape[1], kv.keys.shape[3]
        self.slots, self.context = slots, context
        self.active = 0
        self.ids = np.zeros((slots, context), np.int64)
        self.logprobs = np.zeros((slots, context), np.float32)
        self.length = np.zeros(slots, np.int64)  # tokens known
        self.cached = np.zeros(slots, np.int64)  # tokens whose keys and values are computed
        self.limit = np.zeros(slots, np.int64)  # length at which the row ends
        self.prompt = np.zeros(slots, np.int64)
        self.top_k = np.zeros(slots, np.int64)
        self.seed = np.zeros(slots, np.uint64)
        self.temperature = np.ones(slots, np.float32)
        self.top_p = np.ones(slots, np.float32)
        self.stops = np.full((slots, MAX_STOP_IDS), -1, np.int64)
        self.requests: list[Request | None] = [None] * slots
        self._per_row = (
            self.length,
            self.cached,
            self.limit,
            self.prompt,
            self.top_k,
            self.seed,
            self.temperature,
            self.top_p,
            self.stops,
        )
        self._keys = [""] * slots
        self._by_key: dict[str, int] = {}
        self._used = np.zeros(slots, np.int64)  # for LRU: the clock at last use; 0 is an empty slot
        self._clock = 0

    # -- coming and going ---------------------------------------------------------------------------------------

    def admit(self, request: Request) -> bool:
        """Give ``request`` a running row, reusing the longest computed prefix there is.

        False: no slot is free, or a running row is about to compute the prefix that this request shares.
        """
        if self.active == self.slots:
            return False
        found = self._find(request)
        if found is None:
            return False
        source, reusable, in_place = found
        if in_place:
            slot = source
        else:
            slot = self._free_slot(keep=source if reusable else -1)
            if slot != source:  # the only idle slot may be the source itself
                self.kv.copy(source, slot, reusable)
        self._forget(slot)
        self.cached[slot] = self.length[slot] = reusable
        self._used[slot] = self._tick()
        self._swap(slot, self.active)
        self._fill(self.active, request, reusable)
        self.active += 1
        return True

    def leave(self, slot: int, *, keep: bool) -> Request:
        """Take the request off its row; with ``keep`` the row stays for reuse."""
        request = self.requests[slot]
        if request is None:
            raise RuntimeError(f"slot {slot} runs nothing")
        n = int(self.length[slot])
        request.tokens = self.ids[slot, :n].copy()
        request.logprobs = self.logprobs[slot, request.prompt_length : n].copy()
        self.requests[slot] = None
        self.active -= 1
        self._swap(slot, self.active)
        slot = self.active
        if keep:
            self.length[slot] = self.cached[slot]
            self._used[slot] = self._tick()
            self._keys[slot] = request.key
            if request.key:
                self._by_key[request.key] = slot
        else:
            self._empty(slot)
        return request

    def fail(self, slot: int) -> Request:
        """Take a request whose last token has no finite score off its row, without that token."""
        self.length[slot] -= 1
        request = self.leave(slot, keep=False)
        self.kv.clear(self.active)  # where leave() put the row
        return request

    def drop_idle(self) -> None:
        """Forget every row that nobody runs: after a change of weights, none of them may be used again."""
        for slot in range(self.active, self.slots):
            self._empty(slot)

    @property
    def tokens_held(self) -> int:
        """Tokens in running and idle rows."""
        return int(self.length.sum())

    # -- prefixes -----------------------------------------------------------------------------------------------

    def _find(self, request: Request) -> tuple[int, int, bool] | None:
        """(slot with the prefix, its reusable length, whether to continue in that very slot)."""
        wanted = request.tokens[:-1]  # the last token must be computed: its logits are what is asked for
        own = self._by_key.get(request.key) if request.key else None
        if own is not None:
            n = min(int(self.cached[own]), len(wanted))
            if n > 0 and np.array_equal(self.ids[own, :n], wanted[:n]):
                return own, n, True
        same = self.ids[:, : len(wanted)] == wanted
        shared = np.where(same.all(1), len(wanted), same.argmin(1)) if len(wanted) else np.zeros(self.slots, np.int64)
        computed = np.minimum(shared, self.cached)
        best = int(computed.argmax())
        promised = np.minimum(shared, self.length)[: self.active]
        if self.active and int(promised.max()) > int(computed[best]) + _WORTH_WAITING:
            return None
        if own is not None and int(computed[own]) == int(computed[best]):
            return own, int(computed[own]), True
        return best, int(computed[best]), False

    def _free_slot(self, *, keep: int) -> int:
        """An empty slot, else the one idle for longest, ``keep`` only when there is no other."""
        candidates = self._used[self.active :].copy()
        if keep >= self.active and len(candidates) > 1:
            candidates[keep - self.active] = np.iinfo(np.int64).max
        return self.active + int(candidates.argmin())

    # -- bookkeeping --------------------------------------------------------------------------------------------

    def _fill(self, slot: int, request: Request, reused: int) -> None:
        n = len(request.tokens)
        self.ids[slot, reused:n] = request.tokens[reused:]
        self.ids[slot, :reused] = request.tokens[:reused]
        self.logprobs[slot, request.prompt_length : n] = request.logprobs
        self.length[slot] = n
        self.prompt[slot] = request.prompt_length
        self.limit[slot] = request.prompt_length + request.max_new_tokens
        self.top_k[slot] = request.top_k
        self.seed[slot] = request.seed
        self.temperature[slot] = request.temperature
        self.top_p[slot] = request.top_p
        self.stops[slot] = -1
        self.stops[slot, : len(request.stops)] = request.stops
        self.requests[slot] = request
        if request.cached_tokens is None:
            request.cached_tokens = reused

    def _forget(self, slot: int) -> None:
        key = self._keys[slot]
        if key and self._by_key.get(key) == slot:
            del self._by_key[key]
        self._keys[slot] = ""

    def _empty(self, slot: int) -> None:
        self._forget(slot)
        self.length[slot] = self.cached[slot] = 0
        self._used[slot] = 0

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        self.kv.swap(a, int(self.cached[a]), b, int(self.cached[b]))
        longest = int(max(self.length[a], self.length[b]))
        pair, crossed = [a, b], [b, a]
        self.ids[pair, :longest] = self.ids[crossed, :longest]
        self.logprobs[pair, :longest] = self.logprobs[crossed, :longest]
        for array in (*self._per_row, self._used):
            array[pair] = array[crossed]
        self.requests[a], self.requests[b] = self.requests[b], self.requests[a]
        moved = {self._keys[old]: new for old, new in ((a, b), (b, a)) if self._by_key.get(self._keys[old]) == old}
        self._by_key.update(moved)
        self._keys[a], self._keys[b] = self._keys[b], self._keys[a]

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
