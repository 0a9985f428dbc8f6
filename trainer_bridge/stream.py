"""Whole groups from the log: decoded ahead of need off the event loop, each once, failures of the farm left out.

The way of a group: the log hands it over whole; a position or a trajectory seen before is skipped; members whose
outcome carries no reward, or of which nothing was measured, are taken out *before* anything is computed over the group.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType

import msgspec

from envfarm.core.errors import CorruptRecord, LogError
from envfarm.core.log import Group
from envfarm.core.trajectory import Trajectory

log = logging.getLogger(__name__)
REMEMBERED = 200_000  # trajectory ids; far more than a log redelivers

Decode = Callable[[bytes], Trajectory]


class TrainingGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The trainable members of one whole group. ``left_out``: members without a reward, with their outcomes."""

    position: int
    group_id: str
    members: tuple[Trajectory, ...]
    left_out: tuple[str, ...] = ()

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version that any member sampled under; ``None`` when none sampled anything."""
        versions = [v for member in self.members if (v := member.oldest_version) is not None]
        return min(versions, default=None)


def training_group(position: int, group_id: str, trajectories: Iterable[Trajectory]) -> TrainingGroup:
    """Keep what the policy can be judged by: a trainable outcome, a measured reward, and sampled tokens."""
    members, left_out = [], []
    for trajectory in trajectories:
        if not trajectory.outcome.trainable:
            left_out.append(str(trajectory.outcome))
        elif all(step.reward is None for step in trajectory.steps):
            left_out.append("nothing was measured")
        elif trajectory.oldest_version is None:
            left_out.append("nothing was sampled")
        else:
            members.append(trajectory)
    return TrainingGroup(position=position, group_id=group_id, members=tuple(members), left_out=tuple(left_out))


class Seen:
    """Positions and trajectory ids that were taken already: the log delivers at least once, training wants once."""

    def __init__(self, after: int, remembered: int = REMEMBERED) -> None:
        self._after = after
        self._remembered = remembered
        self._ids: OrderedDict[str, None] = OrderedDict()

    def fresh(self, group: Group) -> Group | None:
        """The group without records seen before; ``None`` when its position is, or when nothing is left."""
        if group.position <= self._after:
            return None
        self._after = group.position
        records = []
        for record in group.records:
            if record.header.id not in self._ids:
                self._ids[record.header.id] = None
                records.append(record)
        while len(self._ids) > self._remembered:
            self._ids.popitem(last=False)
        return Group(position=group.position, group_id=group.group_id, records=tuple(records)) if records else None


class GroupStream:
    """Groups in order, at most ``prefetch`` of them decoded ahead. Use as an async context manager."""

    def __init__(self, source: AsyncIterator[Group], decode: Decode, *, after: int, prefetch: int) -> None:
        self._source = source
        self._decode = decode
        self._seen = Seen(after)
        self._queue: asyncio.Queue[TrainingGroup | BaseException] = asyncio.Queue(max(1, prefetch))
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> GroupStream:
        self._reader = asyncio.create_task(self._read(), name="trajectory stream")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._reader is not None
        self._reader.cancel()
        await asyncio.wait([self._reader])

    async def next(self, timeout: float) -> TrainingGroup | None:
        """The next group, or ``None`` when none came within ``timeout`` seconds. Raises what ended the stream."""
        try:
            async with asyncio.timeout(timeout):
                item = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(item, BaseException):
            self._queue.put_nowait(item)  # so that whoever asks again learns it too
            raise item
        return item

    async def _read(self) -> None:
        try:
            async for group in self._source:
                fresh = self._seen.fresh(group)
                if fresh is not None:
                    await self._queue.put(await asyncio.to_thread(self._decoded, fresh))
            end: Exception = LogError("the log ended the subscription; expected it to go on for ever")
        except Exception as error:  # whoever asks for the next group gets it
            end = error
        finally:
            close = getattr(self._source, "aclose", None)
            if close is not None:
                await close()
        await self._queue.put(end)

    def _decoded(self, group: Group) -> TrainingGroup:
        whole = []
        for record in group.records:
            try:
                whole.append(self._decode(record.payload))
            except CorruptRecord as error:
                log.warning("trajectory %s of group %s is left out: %s", record.header.id, group.group_id, error)
        return training_group(group.position, group.group_id, whole)
