"""The slots of a host: who has which, what each last answered, and what becomes of it afterwards.

Every command is answered through a callback, on the loop, exactly once. Steps are exactly-once in effect: the last
answer of an episode is kept by index and digest, a repeat gets it, and one that arrives while the step still runs
waits for the same end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from envfarm.core.errors import (
    EnvironmentCodeError,
    FarmError,
    SlotLost,
    StepConflict,
    Unavailable,
)
from envfarm.wire.status import to_status
from envfarm.wire.v1 import host_pb2
from sandboxes.host.environments import Environments, Loaded
from sandboxes.host.instance import Instance
from sandboxes.host.recycling import Recycling
from sandboxes.host.results import exception_text
from sandboxes.host.runner import Runner
from sandboxes.host.slot import Slot
from sandboxes.host.step import EpisodeState, Step
from sandboxes.host.work import Closing, Opening
from sandboxes.isolation.files.snapshots import SnapshotStore
from sandboxes.isolation.surroundings import MACHINE, Surroundings

log = logging.getLogger(__name__)
Answer = Callable[[host_pb2.SlotReply], None]


class Episode:
    """One episode in one slot."""

    def __init__(self, episode_id: str, loaded: Loaded, slot: Slot) -> None:
        self.id = episode_id
        self.loaded = loaded
        self.slot = slot
        self.instance: Instance | None = None
        self.state: EpisodeState | None = None  # none yet: it is being opened
        self.first: host_pb2.SlotAcquired | None = None
        self.next = 0
        self.last: tuple[int, bytes, host_pb2.SlotReply] | None = None
        self.running: tuple[int, bytes] | None = None
        self.waiting: list[Answer] = []  # for what runs now
        self.closing: list[Answer] | None = None  # set: it ends once nothing runs
        self.failure = False
        self.touched = time.monotonic()
        self.lease = 0.0  # seconds without a sign of its client until it ends; 0: it has none
        self.heard = self.touched  # when its client gave one that was no command


class Slots:
    """All slots of a host."""

    def __init__(
        self,
        count: int,
        ground: Path,
        environments: Environments,
        runner: Runner,
        surroundings: Surroundings = MACHINE,
    ) -> None:
        self._environments = environments
        self._runner = runner
        snapshots = SnapshotStore(ground)
        self._slots = [Slot(index, ground, surroundings, snapshots) for index in range(count)]
        self._recycling = Recycling(self._slots)
        self._episodes: dict[str, Episode] = {}
        self._answered = asyncio.Event()
        self.draining = False

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def busy(self) -> int:
        """Slots taken."""
        return len(self._episodes)

    @property
    def quarantined(self) -> list[str]:
        """Slots out of use, with their causes."""
        return self._recycling.quarantined

    @property
    def unfit(self) -> str:
        """Why this host should be replaced; empty when it need not be."""
        return self._recycling.unfit

    async def prepare(self) -> None:
        """Make slots ready ahead of the first episodes."""
        await self._recycling.prepare(self._environments.loaded)

    async def quiet(self, *, released: bool) -> None:
        """Returns once no slot has work that is not answered yet, or (``released``) once every slot is free."""
        while any(released or e.waiting or e.closing is not None for e in self._episodes.values()):
            self._answered.clear()
            await self._answered.wait()

    # Commands

    def acquire(self, request: host_pb2.AcquireSlot, answer: Answer) -> None:
        """Take a slot and reset its environment."""
        episode = self._episodes.get(request.episode_id)
        if episode is not None:
            self._acquire_again(episode, answer)
            return
        if self.draining:
            raise Unavailable("this host is draining and takes no new episode")
        loaded = self._environments.get(request.environment)
        slot = self._take(loaded)
        episode = Episode(request.episode_id, loaded, slot)
        episode.lease = request.lease_s
        episode.waiting.append(answer)
        self._episodes[episode.id] = episode
        opening = Opening(loaded, slot.sandbox(loaded), slot.instances.get(loaded.name), request)
        opening.start(self._runner, partial(self._opened, episode, opening))

    def step(self, request: host_pb2.RunStep, answer: Answer) -> None:
        """Run a step, or answer its repeat."""
        episode = self._episodes.get(request.episode_id)
        if episode is None or episode.closing is not None:
            raise SlotLost(f"episode {request.episode_id} has no slot here: released, expired or never opened")
        index = request.index
        episode.touched = time.monotonic()
        if episode.running is not None:
            if episode.running != (index, request.digest):
                raise StepConflict(f"step {episode.running[0]} of {episode.id} still runs; step {index} came meanwhile")
            episode.waiting.append(answer)
            return
        if episode.last is not None and episode.last[0] == index:
            if episode.last[1] != request.digest:
                raise StepConflict(f"step {index} of {episode.id} was already taken with another action")
            answer(_copy(episode.last[2]))
            return
        if episode.state is None:
            raise StepConflict(f"episode {episode.id} is still being opened")
        if index != episode.next:
            raise StepConflict(f"step {index} of {episode.id} is out of order: next is {episode.next}")
        if episode.last is not None and episode.last[2].ran.done:
            raise StepConflict(f"episode {episode.id} is over since step {episode.last[0]}")
        episode.running = (index, request.digest)
        episode.waiting.append(answer)
        step = Step(episode.state, request)
        step.start(self._runner, partial(self._stepped, episode))

    def release(self, episode_id: str, answer: Answer) -> None:
        """Free a slot; waits for what runs in it."""
        episode = self._episodes.get(episode_id)
        if episode is None:
            answer(host_pb2.SlotReply(released=host_pb2.SlotReleased()))
        elif episode.closing is not None:
            episode.closing.append(answer)
        else:
            episode.closing = [answer]
            if not episode.waiting:
                self._close(episode)

    def expire(self, now: float, *, reachable: bool) -> int:
        """Close episodes that were idle for as long as they may be; returns how many.

        Unless ``reachable``, no client could say that it still wants its episodes: their leases stand still.
        """
        expired = 0
        for episode in list(self._episodes.values()):
            if not reachable:
                episode.heard = now
            if episode.closing is None and not episode.waiting:
                why = _why_over(episode, now)
                if why:
                    log.info("episode %s is over: %s", episode.id, why)
                    self.release(episode.id, _nobody)
                    expired += 1
        return expired

    def touch(self, episode_ids: Iterable[str], answer: Answer) -> None:
        """Renew leases; the answer names the episodes that are not here."""
        now, gone = time.monotonic(), []
        for episode_id in episode_ids:
            episode = self._episodes.get(episode_id)
            if episode is None or episode.closing is not None:
                gone.append(episode_id)
            else:
                episode.heard = now
        answer(host_pb2.SlotReply(touched=host_pb2.SlotsTouched(gone=gone)))

    async def close(self) -> None:
        """Let go of every slot's folders and groups."""
        await self._recycling.close()
        for slot in self._slots:
            slot.close()

    # What follows

    def _acquire_again(self, episode: Episode, answer: Answer) -> None:
        if episode.closing is not None:
            raise SlotLost(f"episode {episode.id} is being closed")
        episode.touched = time.monotonic()
        if episode.first is None:
            episode.waiting.append(answer)
        else:
            answer(host_pb2.SlotReply(acquired=episode.first))

    def _take(self, loaded: Loaded) -> Slot:
        slot = self._recycling.take(loaded)
        if slot is None:
            quarantined = len(self.quarantined)
            out = f", {quarantined} of them quarantined" if quarantined else ""
            raise Unavailable(f"all {len(self._slots)} slots of this host are taken{out}")
        return slot

    def _opened(self, episode: Episode, opening: Opening, value: Any, error: BaseException | None) -> None:
        if opening.stuck is not None:
            episode.slot.stuck.append(opening.stuck)
        episode.touched = time.monotonic()
        instance = episode.instance = opening.instance
        if error is None and instance is not None:
            episode.slot.instances[episode.loaded.name] = instance
            expires = episode.touched + episode.loaded.limits.seconds
            progress = value.progress if value.HasField("progress") else None
            episode.state = EpisodeState(instance, progress, expires)
            episode.first = value
            reply = host_pb2.SlotReply(acquired=value)
        else:
            episode.failure = True
            episode.slot.instances.pop(episode.loaded.name, None)
            reply = host_pb2.SlotReply(error=to_status(_typed(episode, error)))
            episode.closing = episode.closing or []
        self._tell(episode, reply)

    def _stepped(self, episode: Episode, value: Any, error: BaseException | None) -> None:
        episode.touched = time.monotonic()
        running, episode.running = episode.running, None
        if error is None and running is not None:
            episode.last = (*running, value)
            episode.next = running[0] + 1
            reply = value
        else:  # in doubt: the episode cannot go on, and the step is never run again
            reply = host_pb2.SlotReply(error=to_status(_typed(episode, error)))
            episode.failure = True
            episode.closing = episode.closing or []
        self._tell(episode, reply)

    def _tell(self, episode: Episode, reply: host_pb2.SlotReply) -> None:
        self._answered.set()
        waiting, episode.waiting = episode.waiting, []
        for answer in waiting[1:]:
            answer(_copy(reply))
        waiting[0](reply)
        if episode.closing is not None:
            self._close(episode)

    def _close(self, episode: Episode) -> None:
        slot, name = episode.slot, episode.loaded.name
        if episode.state is not None:
            slot.stuck += episode.state.stuck
        if slot.stuck or episode.failure:
            slot.instances.pop(name, None)
        # An instance in which a call still hangs is left alone: two threads must not be in it.
        closing = Closing(name, None if slot.stuck else episode.instance)
        closing.start(self._runner, partial(self._closed, episode, closing))

    def _closed(self, episode: Episode, closing: Closing, dirty: Any, error: BaseException | None) -> None:
        slot = episode.slot
        if closing.stuck is not None:
            slot.stuck.append(closing.stuck)
        if dirty or error is not None:
            log.warning("episode %s: %s", episode.id, dirty or error)
            slot.instances.pop(episode.loaded.name, None)
        self._recycling.give_back(slot, episode.loaded, partial(self._released, episode))

    def _released(self, episode: Episode) -> None:
        del self._episodes[episode.id]
        self._answered.set()
        for answer in episode.closing or ():
            answer(host_pb2.SlotReply(released=host_pb2.SlotReleased()))


def _why_over(episode: Episode, now: float) -> str:
    if now - episode.touched > episode.loaded.limits.seconds:
        return f"no step for {episode.loaded.limits.seconds:g} s, all the time that it has"
    if episode.lease and now - max(episode.touched, episode.heard) > episode.lease:
        return f"no sign of its client for {episode.lease:g} s"
    return ""


def _typed(episode: Episode, error: BaseException | None) -> FarmError:
    if isinstance(error, FarmError):
        return error
    if error is not None:
        log.error("episode %s failed", episode.id, exc_info=error)
    text = exception_text(error) if error is not None else "no result"
    return EnvironmentCodeError(f"environment {episode.loaded.name!r}: {text}")


def _copy(reply: host_pb2.SlotReply) -> host_pb2.SlotReply:
    copy = host_pb2.SlotReply()
    copy.CopyFrom(reply)
    return copy


def _nobody(_: host_pb2.SlotReply) -> None:
    """Nobody waits for this answer."""
