"""Client of the run registry. Every call may be repeated, so each is, until its time is up."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import grpc.aio

from envfarm.core.deadline import Deadline
from envfarm.core.ids import new_id
from envfarm.core.run import GroupTicket, MetricPoint, Run, RunSettings, RunState
from envfarm.wire.convert.enums import STATE_TO_PB
from envfarm.wire.convert.runs import point_from_pb, point_to_pb, run_from_pb, settings_to_pb, ticket_from_pb
from envfarm.wire.retry import following, retrying
from envfarm.wire.v1 import run_pb2 as pb
from envfarm.wire.v1.run_pb2_grpc import RunServiceStub

QUERY_SECONDS = 60.0
GRACE_SECONDS = 40.0
"""What a call may take beyond the wait that was asked for: listing an environment's tasks, reconnecting."""

Tickets = list[GroupTicket]
Points = list[MetricPoint]


class RunClient:
    """Client of ``RunService``. The channel stays the caller's to close. Raises the farm's errors.

    Tickets belong to one client: a worker that starts again under the same name holds none of those it had before,
    and what this client reports tells the registry that it is still there.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = RunServiceStub(channel)
        self._instance = new_id("client")
        self._worker = ""  # as which this client acquires, once it does

    async def create(self, name: str, settings: RunSettings, request_id: str = "") -> Run:
        """A new run; the same one again for a ``request_id`` (default: a fresh one) that was used before."""
        request = pb.CreateRunRequest(
            name=name, settings=settings_to_pb(settings), request_id=request_id or new_id("request")
        )
        answer = await retrying(lambda left: self._stub.CreateRun(request, timeout=left), timeout=QUERY_SECONDS)
        return run_from_pb(answer.run)

    async def get(self, run_id: str) -> Run:
        """The run as it is now. Raises ``ConfigError`` when there is none."""
        request = pb.GetRunRequest(run_id=run_id)
        answer = await retrying(lambda left: self._stub.GetRun(request, timeout=left), timeout=QUERY_SECONDS)
        return run_from_pb(answer.run)

    async def set_state(self, run_id: str, state: RunState, cause: str) -> Run:
        """Pause, resume or stop; ``cause`` says who or what wants it."""
        request = pb.SetRunStateRequest(run_id=run_id, state=STATE_TO_PB[state], cause=cause)
        answer = await retrying(lambda left: self._stub.SetRunState(request, timeout=left), timeout=QUERY_SECONDS)
        return run_from_pb(answer.run)

    async def acquire(self, run_id: str, worker: str, limit: int, timeout: float) -> tuple[Tickets, Run, str]:
        """Tickets for the next groups: (tickets, the run now, what is waited for when there are none).

        Waits up to ``timeout`` seconds for the first ticket. A lost answer is asked for again, not issued twice.
        """
        deadline = Deadline.after(timeout)
        request_id = new_id("acquire")
        self._worker = f"{worker} {self._instance}"

        async def ask(left: float) -> pb.AcquireGroupsResponse:
            request = pb.AcquireGroupsRequest(
                run_id=run_id, worker=self._worker, limit=limit, timeout_s=deadline.remaining(), request_id=request_id
            )
            return await self._stub.AcquireGroups(request, timeout=left)

        answer = await retrying(ask, timeout=timeout + GRACE_SECONDS)
        run = run_from_pb(answer.run)
        return [ticket_from_pb(ticket, run) for ticket in answer.tickets], run, answer.waiting_for

    async def publish_version(self, run_id: str, version: int) -> None:
        """The trainer has published ``version``."""
        request = pb.PublishVersionRequest(run_id=run_id, version=version)
        await retrying(lambda left: self._stub.PublishVersion(request, timeout=left), timeout=QUERY_SECONDS)

    async def report(self, run_id: str, points: Sequence[MetricPoint]) -> None:
        """Add points to series."""
        sent = [point_to_pb(point) for point in points]
        request = pb.ReportMetricsRequest(run_id=run_id, points=sent, worker=self._worker)
        await retrying(lambda left: self._stub.ReportMetrics(request, timeout=left), timeout=QUERY_SECONDS)

    async def watch(self, run_id: str, history: bool = False) -> AsyncGenerator[tuple[Run, Points], None]:
        """The run now, and again with new points whenever something changes; ``history`` begins with all stored points.

        Reconnects; points reported in that moment may be missed. Raises ``Unavailable`` when no server was there for
        a minute. Closing the iterator (``aclosing``) ends the call.
        """
        wanted = history

        def start() -> grpc.aio.UnaryStreamCall[pb.WatchRunRequest, pb.WatchRunResponse]:
            return self._stub.WatchRun(pb.WatchRunRequest(run_id=run_id, history=wanted))

        async with aclosing(following(start, patience=QUERY_SECONDS)) as responses:
            async for response in responses:
                wanted = False
                yield run_from_pb(response.run), [point_from_pb(point) for point in response.points]

    async def list(self) -> list[Run]:
        """All runs, newest first."""
        request = pb.ListRunsRequest()
        answer = await retrying(lambda left: self._stub.ListRuns(request, timeout=left), timeout=QUERY_SECONDS)
        return [run_from_pb(run) for run in answer.runs]
