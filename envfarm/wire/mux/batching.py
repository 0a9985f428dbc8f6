"""What both sides of a multiplexed stream share: the shape of its messages, and how they are filled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from google.rpc import status_pb2

from envfarm.wire.channel import MESSAGE_BYTES

MOST_BYTES = MESSAGE_BYTES
SPLIT_BYTES = MESSAGE_BYTES // 4


class CommandMessage(Protocol):
    """A protobuf command."""

    @property
    def id(self) -> int:
        """Tells it from the others in flight."""
        ...

    def WhichOneof(self, oneof_group: Any, /) -> Any:  # noqa: N802 - protobuf's name
        """Name of the member of the one-of that is set."""
        ...


class ReplyMessage(CommandMessage, Protocol):
    """A protobuf reply."""

    @property
    def error(self) -> status_pb2.Status:
        """Set when the command failed."""
        ...


C = TypeVar("C", bound=CommandMessage)
R = TypeVar("R", bound=ReplyMessage)


def batches(make: Callable[[], Any], field: str, items: list[tuple[int, Any]]) -> Iterable[tuple[Any, int, int]]:
    """Messages that hold ``items`` in order, none much larger than it must be; each with its count and its bytes.

    Ids are set on the copies, so that one stored reply can answer two commands.
    """
    message = make()
    add = getattr(message, field).add
    for number, item in items:
        copy = add()
        copy.CopyFrom(item)  # less than half the cost of handing the list to the constructor
        copy.id = number
    size = message.ByteSize()
    if len(items) > 1 and size > SPLIT_BYTES:
        middle = len(items) // 2
        yield from batches(make, field, items[:middle])
        yield from batches(make, field, items[middle:])
    else:
        yield message, len(items), size


async def gathered(count: Callable[[], int], in_flight: int) -> None:
    """Returns when everything in flight is there, or a turn of the event loop has added nothing.

    So a lone command leaves at once, and what comes in bursts leaves in one message.
    """
    before = -1
    while before < (now := count()) < in_flight:
        before = now
        await asyncio.sleep(0)
