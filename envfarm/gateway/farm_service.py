# ruff: noqa: N802 - methods have gRPC's names
"""``FarmService``: how pools and hosts do, for whoever operates the farm."""

from __future__ import annotations

from typing import Any

import grpc.aio

from envfarm.gateway.hosts import HostPools
from envfarm.wire.convert.farm import farm_to_pb
from envfarm.wire.v1 import farm_pb2 as pb
from envfarm.wire.v1.farm_pb2_grpc import FarmServiceServicer


class FarmServicer(FarmServiceServicer):
    """Serves one :class:`HostPools`. Names and arguments are gRPC's."""

    def __init__(self, pools: HostPools) -> None:
        self._pools = pools

    async def GetFarm(
        self, _request: pb.GetFarmRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetFarmResponse:
        """Everything as it is now."""
        return farm_to_pb(self._pools.status())
