# ruff: noqa: N802 - methods have gRPC's names
"""``RunService``: the run registry over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc.aio

from envfarm.core.errors import ConfigError
from envfarm.runs.registry import RunRegistry
from envfarm.wire.convert.enums import STATE_FROM_PB
from envfarm.wire.convert.runs import point_from_pb, point_to_pb, run_to_pb, settings_from_pb, ticket_to_pb
from envfarm.wire.status import reported
from envfarm.wire.v1 import run_pb2 as pb
from envfarm.wire.v1.run_pb2_grpc import RunServiceServicer

_MOST_WAIT_SECONDS = 300.0

Context = grpc.aio.ServicerContext


class RunServicer(RunServiceServicer):
    """Serves one ``RunRegistry``."""

    def __init__(self, registry: RunRegistry) -> None:
        self._registry = registry

    async def CreateRun(
        self, request: pb.CreateRunRequest, context: Context[pb.CreateRunRequest, pb.CreateRunResponse]
    ) -> pb.CreateRunResponse:
        """A new run, or the one that the request id made before."""
        async with reported(context):
            run = await self._registry.create(request.name, settings_from_pb(request.settings), request.request_id)
            return pb.CreateRunResponse(run=run_to_pb(run))

    async def GetRun(
        self, request: pb.GetRunRequest, context: Context[pb.GetRunRequest, pb.GetRunResponse]
    ) -> pb.GetRunResponse:
        """One run."""
        async with reported(context):
            return pb.GetRunResponse(run=run_to_pb(await self._registry.get(request.run_id)))

    async def ListRuns(
        self, _request: pb.ListRunsRequest, context: Context[pb.ListRunsRequest, pb.ListRunsResponse]
    ) -> pb.ListRunsResponse:
        """All runs, newest first."""
        async with reported(context):
            return pb.ListRunsResponse(runs=[run_to_pb(run) for run in await self._registry.list()])

    async def SetRunState(
        self, request: pb.SetRunStateRequest, context: Context[pb.SetRunStateRequest, pb.SetRunStateResponse]
    ) -> pb.SetRunStateResponse:
        """Pause, resume or stop."""
        async with reported(context):
            state = STATE_FROM_PB.get(request.state)
            if state is None:
                raise ConfigError(f"run state {int(request.state)}; expected running, paused or stopped")
            run = await self._registry.set_state(request.run_id, state, request.cause)
            return pb.SetRunStateResponse(run=run_to_pb(run))

    async def AcquireGroups(
        self, request: pb.AcquireGroupsRequest, context: Context[pb.AcquireGroupsRequest, pb.AcquireGroupsResponse]
    ) -> pb.AcquireGroupsResponse:
        """Tickets, or the reason why there are none."""
        async with reported(context):
            tickets, run, waiting_for = await self._registry.acquire(
                request.run_id,
                request.worker,
                request.limit,
                min(max(request.timeout_s, 0.0), _MOST_WAIT_SECONDS),
                request.request_id,
            )
            return pb.AcquireGroupsResponse(
                tickets=[ticket_to_pb(ticket) for ticket in tickets], run=run_to_pb(run), waiting_for=waiting_for
            )

    async def PublishVersion(
        self, request: pb.PublishVersionRequest, context: Context[pb.PublishVersionRequest, pb.PublishVersionResponse]
    ) -> pb.PublishVersionResponse:
        """Note a policy version."""
        async with reported(context):
            await self._registry.publish_version(request.run_id, request.version)
            return pb.PublishVersionResponse()

    async def ReportMetrics(
        self, request: pb.ReportMetricsRequest, context: Context[pb.ReportMetricsRequest, pb.ReportMetricsResponse]
    ) -> pb.ReportMetricsResponse:
        """Add points."""
        async with reported(context):
            points = [point_from_pb(point) for point in request.points]
            await self._registry.report(request.run_id, points, request.worker)
            return pb.ReportMetricsResponse()

    async def WatchRun(
        self, request: pb.WatchRunRequest, context: Context[pb.WatchRunRequest, pb.WatchRunResponse]
    ) -> AsyncIterator[pb.WatchRunResponse]:
        """State and metrics as they change, as fast as the reader takes them."""
        async with reported(context), aclosing(self._registry.watch(request.run_id, request.history)) as changes:
            async for run, points in changes:
                yield pb.WatchRunResponse(run=run_to_pb(run), points=[point_to_pb(point) for point in points])
