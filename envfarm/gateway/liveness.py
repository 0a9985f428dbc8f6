"""Passes on which episodes are still wanted: their clients live, though they take no step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from envfarm.core.errors import FarmError
from envfarm.gateway.handles import Seat
from envfarm.gateway.hosts import HostPools
from envfarm.wire.v1.host_pb2 import SlotCommand, TouchSlots

log = logging.getLogger(__name__)


async def touch(handles: Iterable[str], seat_of: Callable[[str], Seat], pool: HostPools, seconds: float) -> list[str]:
    """Renew the leases of the episodes behind ``handles``, in whichever hosts they sit.

    Returns the handles of episodes that have no slot any more. What a host could not be told is in none of them: its
    client says it again.
    """
    gone: list[str] = []
    by_host: dict[tuple[str, str], dict[str, str]] = {}  # host and address → episode → handle
    for handle in handles:
        try:
            seat = seat_of(handle)
        except FarmError:
            gone.append(handle)  # it has expired, or never was one
        else:
            by_host.setdefault((seat.host_id, seat.address), {})[seat.episode_id] = handle
    told = [_tell(pool, host_id, address, episodes, seconds) for (host_id, address), episodes in by_host.items()]
    for lost in await asyncio.gather(*told):
        gone += lost
    return gone


async def _tell(pool: HostPools, host_id: str, address: str, episodes: dict[str, str], seconds: float) -> list[str]:
    if host_id not in pool.links and pool.may_adopt(host_id):
        await pool.adopt(host_id, address)
    link = pool.links.get(host_id)
    if link is None:
        return list(episodes.values())
    try:
        reply = await link.call(SlotCommand(touch=TouchSlots(episode_ids=episodes)), seconds)
    except FarmError as error:
        log.info("host %s could not be told of %d leases: %s", host_id, len(episodes), error)
        return []
    return [episodes[episode] for episode in reply.touched.gone if episode in episodes]
