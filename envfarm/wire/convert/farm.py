"""The farm as its operator sees it, to protobuf and back."""

from __future__ import annotations

from envfarm.core.pool import FarmStatus, HostStatus, LostHost, PoolState, PoolStatus, Suspension
from envfarm.core.sandbox import Isolation
from envfarm.wire.convert.enums import ISOLATION_FROM_PB, ISOLATION_TO_PB
from envfarm.wire.v1 import farm_pb2 as pb

_STATE_TO_PB = {s: pb.PoolState.Value(f"POOL_STATE_{s.name}") for s in PoolState}
_STATE_FROM_PB = {number: s for s, number in _STATE_TO_PB.items()}


def farm_to_pb(farm: FarmStatus) -> pb.GetFarmResponse:
    """Farm status to protobuf."""
    return pb.GetFarmResponse(
        pools=[_pool_to_pb(p) for p in farm.pools],
        suspended=[
            pb.Suspension(environment=s.environment, cause=s.cause, retry_in_s=s.retry_in_s) for s in farm.suspended
        ],
        lost=[pb.LostHost(id=h.id, cause=h.cause) for h in farm.lost],
        broken=farm.broken,
    )


def farm_from_pb(message: pb.GetFarmResponse) -> FarmStatus:
    """Farm status from protobuf."""
    return FarmStatus(
        pools=tuple(_pool_from_pb(p) for p in message.pools),
        suspended=tuple(
            Suspension(environment=s.environment, cause=s.cause, retry_in_s=s.retry_in_s) for s in message.suspended
        ),
        lost=tuple(LostHost(id=h.id, cause=h.cause) for h in message.lost),
        broken=tuple(message.broken),
    )


def _pool_to_pb(pool: PoolStatus) -> pb.PoolStatus:
    return pb.PoolStatus(
        image=pool.image,
        state=_STATE_TO_PB[pool.state],
        wanted=pool.wanted,
        hosts=[_host_to_pb(h) for h in pool.hosts],
        environments=pool.environments,
        waiting=pool.waiting,
        cause=pool.cause,
        retry_in_s=pool.retry_in_s,
    )


def _pool_from_pb(message: pb.PoolStatus) -> PoolStatus:
    return PoolStatus(
        image=message.image,
        state=_STATE_FROM_PB.get(message.state, PoolState.DOWN),
        wanted=message.wanted,
        hosts=tuple(_host_from_pb(h) for h in message.hosts),
        environments=tuple(message.environments),
        waiting=message.waiting,
        cause=message.cause,
        retry_in_s=message.retry_in_s if message.HasField("retry_in_s") else None,
    )


def _host_to_pb(host: HostStatus) -> pb.HostStatus:
    return pb.HostStatus(
        id=host.id,
        address=host.address,
        slots=host.slots,
        busy=host.busy,
        quarantined=host.quarantined,
        isolation=ISOLATION_TO_PB[host.isolation],
        foreign=not host.ours,
    )


def _host_from_pb(message: pb.HostStatus) -> HostStatus:
    return HostStatus(
        id=message.id,
        address=message.address,
        slots=message.slots,
        busy=message.busy,
        quarantined=tuple(message.quarantined),
        isolation=ISOLATION_FROM_PB.get(message.isolation, Isolation.NONE),
        ours=not message.foreign,
    )
