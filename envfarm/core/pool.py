"""What an operator sees of the hosts of a farm: pools, their states and causes, and environments that are held back."""

from __future__ import annotations

import enum

import msgspec

from envfarm.core.sandbox import Isolation


class PoolState(enum.StrEnum):
    """How a pool of hosts does. ``short``: fewer hosts than wanted; ``down``: none, and the last try failed."""

    STARTING = "starting"
    READY = "ready"
    SHORT = "short"
    DOWN = "down"


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One host by its last report. ``slots`` are those in use or free, quarantined ones left out."""

    id: str
    address: str
    slots: int
    busy: int
    isolation: Isolation
    quarantined: tuple[str, ...] = ()  # slots out of use, with their causes
    ours: bool = True  # else another gateway made it, and only episodes that sit in it already are served


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts of one image. ``cause``: why hosts are missing; ``retry_in_s``: until the backend is asked again."""

    image: str  # empty: the hosts' own system
    state: PoolState
    wanted: int
    hosts: tuple[HostStatus, ...]
    environments: tuple[str, ...]  # whose episodes sit here
    waiting: int = 0  # episodes in line for a slot
    cause: str = ""
    retry_in_s: float | None = None


class Suspension(msgspec.Struct, frozen=True, kw_only=True):
    """An environment that is not opened for now, since hosts were lost again and again while it ran."""

    environment: str
    cause: str
    retry_in_s: float


class LostHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host that is not in use any more."""

    id: str
    cause: str


class FarmStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at one moment. ``broken``: environments that could not be loaded, with their causes."""

    pools: tuple[PoolStatus, ...]
    suspended: tuple[Suspension, ...] = ()
    lost: tuple[LostHost, ...] = ()  # the latest, oldest first
    broken: tuple[str, ...] = ()
