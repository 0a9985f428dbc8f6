"""The policy side's view of a gateway: open, step, close, over one multiplexed stream that heals itself.

Steps are exactly-once in effect, opens carry a request id, closing twice is no error: so every command is sent again
when the gateway goes away, until its time is up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

import grpc.aio

from envfarm.core.deadline import Deadline
from envfarm.core.episode import EnvironmentInfo, Opened, StepAnswer, TextAction
from envfarm.core.errors import ConfigError, Unavailable
from envfarm.core.messages import AssistantMessage
from envfarm.core.rewards import RewardSettings
from envfarm.core.task import Task
from envfarm.wire.convert.episodes import answer_from_pb, info_from_pb, opened_from_pb
from envfarm.wire.convert.messages import fill_assistant
from envfarm.wire.convert.tasks import reward_to_pb, task_from_pb, task_to_pb
from envfarm.wire.leases import LEASE_SECONDS, Leases
from envfarm.wire.mux import MuxClient
from envfarm.wire.retry import retrying
from envfarm.wire.v1.episode_pb2 import (
    CloseRequest,
    Command,
    DescribeRequest,
    InteractRequest,
    OpenRequest,
    Reply,
    TasksRequest,
    TouchRequest,
)
from envfarm.wire.v1.episode_pb2_grpc import EpisodeServiceStub

QUERY_SECONDS = 60.0


class EpisodeClient:
    """Client of ``EpisodeService``; an async context manager. The channel stays the caller's to close.

    Every method raises the farm's errors: :class:`Unavailable` when no gateway (or no free slot) was there until
    ``timeout``, :class:`DeadlineExceeded` when one did not answer in time, and whatever the gateway refused with.
    ``lease``: seconds after which the slots of its episodes are freed when this client is gone without closing them.
    """

    def __init__(self, channel: grpc.aio.Channel, *, limit: int = 8192, lease: float = LEASE_SECONDS) -> None:
        self._stub = EpisodeServiceStub(channel)
        self._mux: MuxClient[Command, Reply] = MuxClient(
            "the gateway", self._stub.Interact, InteractRequest, limit=limit
        )
        self._lease = lease
        self._leases = Leases(self._touch, lease)

    async def __aenter__(self) -> EpisodeClient:
        await self._mux.__aenter__()
        await self._leases.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leases.__aexit__(kind, error, trace)
        await self._mux.__aexit__(kind, error, trace)

    async def describe(self, environment: str = "") -> list[EnvironmentInfo]:
        """What ``environment`` (default: every environment) offers."""
        request = DescribeRequest(environment=environment)
        response = await retrying(lambda left: self._stub.Describe(request, timeout=left), timeout=QUERY_SECONDS)
        return [info_from_pb(pb) for pb in response.environments]

    async def tasks(self, environment: str, split: str, offset: int, limit: int) -> list[Task]:
        """At most ``limit`` (1 to 1000) tasks from position ``offset``; fewer means that the split ends there."""
        request = TasksRequest(environment=environment, split=split, offset=offset, limit=limit)
        response = await retrying(lambda left: self._stub.Tasks(request, timeout=left), timeout=QUERY_SECONDS)
        return [task_from_pb(pb) for pb in response.tasks]

    async def open(
        self,
        *,
        environment: str,
        task: Task,
        seed: int,
        run_id: str = "",
        reward: RewardSettings | None = None,
        request_id: str,
        timeout: float,
    ) -> Opened:
        """Start an episode; waits for a free slot. The same ``request_id`` never opens two.

        Raises :class:`ConfigError` for what no message can carry.
        """
        try:
            request = OpenRequest(
                environment=environment,
                task=task_to_pb(task),
                seed=seed,
                run_id=run_id,
                reward=reward_to_pb(reward) if reward is not None else None,
                request_id=request_id,
                lease_s=self._lease,
            )
        except (ValueError, TypeError) as error:
            raise _unsendable(f"the opening of {environment!r}", error) from error
        reply = await self._command(lambda left: Command(open=request, timeout_s=_told(left)), timeout)
        self._leases.want(reply.open.handle)
        return opened_from_pb(reply.open)

    async def step(
        self,
        handle: str,
        index: int,
        action: AssistantMessage | TextAction,
        *,
        sampled_tokens: int | None = None,
        truncated: bool = False,
        limit: str = "",
        timeout: float,
    ) -> StepAnswer:
        """Take step ``index``. ``limit`` (``tokens``, ``context``, ``time``) ends the episode with it.

        Raises :class:`StepConflict` when the index was used with another action, :class:`ConfigError` for what no
        message can carry: an index out of range, text with half of a surrogate pair.
        """
        self._leases.want(handle)
        command = Command(timeout_s=_told(timeout))
        request = command.step  # filled in place, which costs half of what protobuf's constructors do
        try:
            request.handle = handle
            request.index = index
            if sampled_tokens is not None:
                request.sampled_tokens = sampled_tokens
            if truncated:
                request.truncated = True
            if limit:
                request.limit = limit
            if isinstance(action, TextAction):
                request.text.format, request.text.text = action.format, action.text
            else:
                fill_assistant(request.message, action)
        except (ValueError, TypeError) as error:
            raise _unsendable(f"step {index}", error) from error

        def again(left: float) -> Command:
            command.timeout_s = _told(left)
            return command

        reply = await self._command(again, timeout)
        return answer_from_pb(reply.step)

    async def close(self, handle: str, reason: str = "", *, timeout: float = 10.0) -> None:
        """End the episode and free its slot; closing twice is no error."""
        self._leases.forget(handle)
        request = CloseRequest(handle=handle, reason=reason)
        await self._command(lambda left: Command(close=request, timeout_s=_told(left)), timeout)

    async def _touch(self, handles: Sequence[str], timeout: float) -> Sequence[str]:
        reply = await self._mux.call(Command(touch=TouchRequest(handles=handles), timeout_s=_told(timeout)), timeout)
        return reply.touch.gone

    async def _command(self, make: Callable[[float], Command], timeout: float) -> Reply:
        deadline = Deadline.after(timeout)
        try:
            return await self._mux.call(make(timeout), timeout)
        except Unavailable:  # only those that must pay for trying again
            return await retrying(lambda left: self._mux.call(make(left), left), timeout=deadline.remaining())


def _told(left: float) -> float:
    """The time that the gateway is given: a little less, so that its own account of a delay arrives in time."""
    return left - min(1.0, 0.1 * left)


def _unsendable(what: str, error: Exception) -> ConfigError:
    return ConfigError(f"{what} cannot be sent: {str(error)[:200]}; expected values that fit the protocol's fields")
