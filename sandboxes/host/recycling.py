"""Which slots are free: those that were proven clean. The others are in quarantine and tried again now and then.

Emptying, proving and preparing block, so they happen in threads of their own, and only for slots in which something was
run or written: an episode that did neither costs nothing here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from envfarm.core.errors import FarmError
from sandboxes.host.environments import Loaded
from sandboxes.host.results import exception_text
from sandboxes.host.slot import Slot

log = logging.getLogger(__name__)
THREADS = 2
PREPARED = 128  # slots at most that are prepared before the host serves
FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 60.0
UNFIT_SHARE = 0.5  # of all slots in quarantine, and
UNFIT_SECONDS = 10.0  # for that long: the host should be replaced
_HANGS = "a call of environment code still hangs in it"


class FreeSlots:
    """Slots to take: for code that runs commands, those that are prepared for its environment come first."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._plain = deque(slots)
        self._ready: dict[str, deque[Slot]] = {}

    def add(self, slot: Slot) -> None:
        """A slot is free again."""
        queue = self._ready.setdefault(slot.ready_for, deque()) if slot.ready_for else self._plain
        queue.append(slot)

    def take(self, loaded: Loaded) -> Slot | None:
        """A slot for an episode of ``loaded``."""
        own = self._ready.get(loaded.name)
        if own:
            return own.popleft()
        if self._plain:
            return self._plain.popleft()
        return next((queue.popleft() for queue in self._ready.values() if queue), None)

    def take_plain(self) -> Slot | None:
        """A slot that is not prepared for anything."""
        return self._plain.popleft() if self._plain else None


class _Quarantine:
    """One slot out of use."""

    def __init__(self, loaded: Loaded, cause: str) -> None:
        self.loaded = loaded
        self.cause = cause
        self.since = time.monotonic()
        self.tries = 0
        self.timer: asyncio.TimerHandle | None = None


class Recycling:
    """Gives out clean slots and takes used ones back. Use from one event loop; :meth:`close` when done."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._count = len(slots)
        self._free = FreeSlots(slots)
        self._quarantined: dict[Slot, _Quarantine] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="slots")
        self._loop = asyncio.get_running_loop()
        self._closed = False

    @property
    def quarantined(self) -> list[str]:
        """Slots out of use, with their causes."""
        return [f"slot {slot.index}: {place.cause}" for slot, place in self._quarantined.items()]

    @property
    def unfit(self) -> str:
        """Why the host should be replaced; empty when it need not be."""
        lately = time.monotonic() - UNFIT_SECONDS
        out = [place for place in self._quarantined.values() if place.since <= lately]
        if len(out) < max(1, UNFIT_SHARE * self._count):
            return ""
        return f"{len(out)} of its {self._count} slots are in quarantine, the last one because {out[-1].cause}"

    def take(self, loaded: Loaded) -> Slot | None:
        """A clean slot; ``None`` when none is free."""
        return self._free.take(loaded)

    async def prepare(self, environments: Sequence[Loaded]) -> None:
        """Make slots ready for those of ``environments`` that run commands, in equal parts, before the first opens."""
        ready = [loaded for loaded in environments if loaded.executes and not loaded.refusal]
        slots = [self._free.take_plain() for _ in range(min(self._count, PREPARED) if ready else 0)]

        def each() -> None:
            for index, slot in enumerate(slots):
                if slot is not None:
                    _prepare(slot, ready[index % len(ready)])

        await self._loop.run_in_executor(self._threads, each)
        for slot in slots:
            if slot is not None:
                self._free.add(slot)

    def give_back(self, slot: Slot, loaded: Loaded, then: Callable[[], None]) -> None:
        """An episode of ``loaded`` is over. ``then`` is called, once, when the slot is free or in quarantine."""
        if slot.hangs():
            self._quarantine(slot, loaded, _HANGS)
            then()
        elif not slot.sandbox(loaded).touched:
            self._free.add(slot)
            then()
        else:
            self._recycle(slot, loaded, then)

    async def close(self) -> None:
        """Stop trying, and wait for what is being done."""
        self._closed = True
        for place in self._quarantined.values():
            if place.timer is not None:
                place.timer.cancel()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    # Inside

    def _recycle(self, slot: Slot, loaded: Loaded, then: Callable[[], None]) -> None:
        sandbox = slot.sandbox(loaded)
        slot.ready_for = ""

        def clean() -> str:
            try:
                sandbox.empty()
            except Exception as error:  # whatever keeps it from being proven clean keeps it from being used
                if not isinstance(error, FarmError):
                    log.exception("slot %d cannot be emptied", slot.index)
                return str(error) if isinstance(error, FarmError) else exception_text(error)
            if loaded.executes:
                _prepare(slot, loaded)
            return ""

        def done(future: Future[str]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for this any more
                if not future.cancelled():
                    self._loop.call_soon_threadsafe(self._recycled, slot, loaded, future.result(), then)

        self._threads.submit(clean).add_done_callback(done)

    def _recycled(self, slot: Slot, loaded: Loaded, cause: str, then: Callable[[], None]) -> None:
        if cause:
            self._quarantine(slot, loaded, cause)
        else:
            place = self._quarantined.pop(slot, None)
            if place is not None:
                log.info("slot %d is clean again, after %d tries", slot.index, place.tries)
            self._free.add(slot)
        then()

    def _quarantine(self, slot: Slot, loaded: Loaded, cause: str) -> None:
        place = self._quarantined.get(slot)
        if place is None:
            place = self._quarantined[slot] = _Quarantine(loaded, cause)
        if not place.tries or place.cause != cause:
            log.warning("slot %d is in quarantine: %s", slot.index, cause)
        place.cause = cause
        if not self._closed:
            wait = min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(place.tries, 16))
            place.timer = self._loop.call_later(wait, self._try_again, slot)

    def _try_again(self, slot: Slot) -> None:
        place = self._quarantined[slot]
        place.tries += 1
        if slot.hangs():
            self._quarantine(slot, place.loaded, _HANGS)
        else:
            self._recycle(slot, place.loaded, _nobody)


def _prepare(slot: Slot, loaded: Loaded) -> None:
    """Make a clean slot ready; one that cannot be is prepared, or refused with the cause, when it is opened."""
    with contextlib.suppress(FarmError, OSError):
        slot.sandbox(loaded).prepare()
        slot.ready_for = loaded.name


def _nobody() -> None:
    """Nobody waits for this."""
