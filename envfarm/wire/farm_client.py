"""Client of the operator's view: pools, hosts, causes."""

from __future__ import annotations

import grpc.aio

from envfarm.core.pool import FarmStatus
from envfarm.wire.convert.farm import farm_from_pb
from envfarm.wire.retry import retrying
from envfarm.wire.v1.farm_pb2 import GetFarmRequest
from envfarm.wire.v1.farm_pb2_grpc import FarmServiceStub

QUERY_SECONDS = 10.0


class FarmClient:
    """Client of ``FarmService``. The channel stays the caller's to close. Raises the farm's errors."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = FarmServiceStub(channel)

    async def status(self, timeout: float = QUERY_SECONDS) -> FarmStatus:
        """Everything as it is now."""
        answer = await retrying(lambda left: self._stub.GetFarm(GetFarmRequest(), timeout=left), timeout=timeout)
        return farm_from_pb(answer)
