"""One host as the gateway sees it: a channel, the multiplexed stream, and how full it is by last report."""

from __future__ import annotations

import asyncio
from types import TracebackType

import grpc

from envfarm.core.errors import FarmError
from envfarm.core.sandbox import Host
from envfarm.core.task import Task
from envfarm.wire.channel import connect
from envfarm.wire.convert.tasks import task_from_pb
from envfarm.wire.mux import Done, MuxClient
from envfarm.wire.status import from_rpc
from envfarm.wire.v1.host_pb2 import (
    DriveRequest,
    InspectRequest,
    InspectResponse,
    ListTasksRequest,
    ReleaseSlot,
    SlotCommand,
    SlotReply,
)
from envfarm.wire.v1.host_pb2_grpc import HostServiceStub

RELEASE_SECONDS = 30.0


class HostLink:
    """A connection to one host; an async context manager.

    ``busy`` is an estimate between reports: the host alone knows, since leases end by its clock. ``acquiring`` of them
    are reserved for opens on their way.
    """

    def __init__(self, host: Host, *, ours: bool = True) -> None:
        self.host = host
        self.ours = ours  # else another gateway made it: it serves its episodes here, but gets no new ones
        self.slots = host.slots
        self.busy = 0
        self.acquiring = 0
        self.cause = ""  # why it is given up, once it is
        self.quarantined: tuple[str, ...] = ()  # slots out of use, with their causes
        self.unfit = ""  # why it should be replaced, by its own account: it gets no new episodes
        self._channel = connect(host.address)
        self._stub = HostServiceStub(self._channel)
        self._mux: MuxClient[SlotCommand, SlotReply] = MuxClient(f"host {host.id}", self._stub.Drive, DriveRequest)
        self.submit = self._mux.submit
        self.call = self._mux.call
        self._suspected = asyncio.Event()
        self._verdict: asyncio.Future[bool] | None = None

    async def __aenter__(self) -> HostLink:
        await self._mux.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._mux.__aexit__(kind, error, trace)
        await self._channel.close()
        self.judge(alive=False)

    @property
    def free(self) -> int:
        """Slots that seem to be free."""
        return self.slots - self.busy if not self.unfit else 0

    def given_up(self) -> bool:
        """Whether this host must not be used any more."""
        return bool(self.cause)

    async def inspect(self, timeout: float) -> InspectResponse:
        """The host's own account of itself. Raises the farm's errors."""
        try:
            return await self._stub.Inspect(InspectRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc(error) from error

    async def tasks(self, environment: str, split: str, offset: int, limit: int, timeout: float) -> list[Task]:
        """A page of tasks. Raises the farm's errors."""
        request = ListTasksRequest(environment=environment, split=split, offset=offset, limit=limit)
        try:
            response = await self._stub.ListTasks(request, timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc(error) from error
        return [task_from_pb(pb) for pb in response.tasks]

    def release(self, episode_id: str, done: Done[SlotReply]) -> None:
        """Free the slot of ``episode_id``. Raises :class:`Unavailable` when nothing can be sent."""
        self.submit(SlotCommand(release=ReleaseSlot(episode_id=episode_id)), RELEASE_SECONDS, done)

    def condemn(self, cause: str) -> None:
        """Have the host given up for ``cause``, without asking it."""
        self.cause = self.cause or cause
        self._suspected.set()

    async def recovered(self) -> bool:
        """Whether the host answers, after its stream broke: has it asked at once, together with whoever else asks."""
        if self.cause:
            return False
        if self._verdict is None:
            self._verdict = asyncio.get_running_loop().create_future()
            self._suspected.set()
        return await asyncio.shield(self._verdict)

    @property
    def doubt(self) -> object:
        """What those who wait in :meth:`recovered` have in common; ``None`` when nobody does."""
        return self._verdict

    async def next_check(self, seconds: float) -> bool:
        """Wait until the next inspection is due; whether somebody suspects the host."""
        try:
            async with asyncio.timeout(seconds):
                await self._suspected.wait()
        except TimeoutError:
            return False
        self._suspected.clear()
        return True

    def hurry(self) -> None:
        """Have the next inspection done now."""
        self._suspected.set()

    def judge(self, *, alive: bool) -> None:
        """Tell everybody in :meth:`recovered` what an inspection found."""
        verdict, self._verdict = self._verdict, None
        if verdict is not None and not verdict.done():
            verdict.set_result(alive)

    def report(self, state: InspectResponse) -> None:
        """Take over the host's own count."""
        self.quarantined = tuple(state.quarantined)
        self.slots = state.slots - len(self.quarantined)
        self.busy = state.busy + self.acquiring
        self.unfit = state.unfit


def ignore(_result: SlotReply | FarmError) -> None:
    """For commands whose result changes nothing."""
