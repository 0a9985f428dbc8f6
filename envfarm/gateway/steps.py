"""One step on its way through the gateway: admitted, sent to the host, composed into an answer. No task, no state.

The answer is a pure function of the request and the host's stored reply, so a step that is sent again is answered
again with the same words and the same reward.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from envfarm.core.deadline import Deadline
from envfarm.core.errors import DeadlineExceeded, EnvironmentCodeError, FarmError, SandboxError, SlotLost, Unavailable
from envfarm.core.ids import digest
from envfarm.core.messages import Diagnosis
from envfarm.core.outcome import Outcome
from envfarm.core.rewards import StepContext
from envfarm.core.task import Limits
from envfarm.gateway.admission import Admitted, admit
from envfarm.gateway.composition import Composition
from envfarm.gateway.handles import Seat
from envfarm.gateway.host_link import HostLink
from envfarm.gateway.served import Served
from envfarm.wire.convert.enums import DIAGNOSIS_TO_PB, outcome_from_pb, outcome_to_pb
from envfarm.wire.convert.messages import assistant_to_pb, call_to_pb, result_from_pb, result_to_pb
from envfarm.wire.convert.tasks import parts_from_pb, parts_to_pb
from envfarm.wire.retry import backoff
from envfarm.wire.v1.episode_pb2 import StepRequest, StepResponse
from envfarm.wire.v1.host_pb2 import RunStep, SlotCommand, SlotReply, StepRan

log = logging.getLogger(__name__)
StepDone = Callable[["StepResponse | FarmError"], None]


class Known:
    """What the gateway remembers of an episode between two steps; all of it can be had from the handle again.

    ``served`` is ``None`` when no host serves the environment any more.
    """

    __slots__ = ("composition", "seat", "served")

    def __init__(self, seat: Seat, served: Served | None, composition: Composition) -> None:
        self.seat = seat
        self.served = served
        self.composition = composition


class StepInFlight:
    """One step in flight. ``begin`` returns at once; ``done`` is called once, with the answer or the error."""

    __slots__ = (
        "_admitted",
        "_attempt",
        "_command",
        "_composition",
        "_deadline",
        "_done",
        "_episode_id",
        "_link",
        "_recover",
        "_request",
        "_served",
    )

    def __init__(
        self,
        known: Known,
        served: Served,
        request: StepRequest,
        deadline: Deadline,
        done: StepDone,
        recover: Callable[[StepInFlight], None],
    ) -> None:
        self._episode_id = known.seat.episode_id
        self._composition = known.composition
        self._served = served
        self._request = request
        self._deadline = deadline
        self._done = done
        self._recover = recover
        self._attempt = 0

    def begin(self, link: HostLink) -> None:
        """Admit the action and send it. Raises :class:`ConfigError` for an action that no policy could have sent."""
        request = self._request
        self._link = link
        self._admitted = admitted = admit(request, self._served)
        self._command = SlotCommand(
            step=RunStep(
                episode_id=self._episode_id,
                index=request.index,
                digest=action_digest(request),
                content=admitted.message.content,
                calls=[call_to_pb(c) for c in admitted.runnable],
                results=[result_to_pb(r) for r in admitted.invalid],
                order=[c.id for c in admitted.message.tool_calls],
                limit=request.limit,
                malformed=admitted.malformed,
            )
        )
        self._send()

    def _send(self) -> None:
        self._link.submit(self._command, self._deadline.remaining(), self._replied)

    def _replied(self, reply: SlotReply | FarmError) -> None:
        if isinstance(reply, FarmError):
            self._failed(reply)
        else:
            self._done(answer(self._request, self._admitted, reply.ran, self._served.limits, self._composition))

    def _failed(self, error: FarmError) -> None:
        if isinstance(error, Unavailable):
            self._recover(self)  # the host may live: its stored reply tells whether the step ran
        elif isinstance(error, SandboxError | EnvironmentCodeError):
            cause = str(error)
            if isinstance(error, SlotLost):
                cause = f"the slot is gone: {cause}"
            self._done(lost(self._request, cause, self._composition))
        else:
            self._done(error)

    async def resend(self) -> None:
        """Send the step again once its host answers; end the episode when it does not."""
        try:
            async with asyncio.timeout(self._deadline.remaining()):
                alive = await self._link.recovered()
                if alive:
                    await asyncio.sleep(backoff(self._attempt))
        except TimeoutError:
            self._done(DeadlineExceeded(f"host {self._link.host.id} did not come back in time"))
            return
        if not alive:
            cause = f"host {self._link.host.id} was lost: {self._link.cause or 'it left'}"
            self._done(lost(self._request, cause, self._composition))
            return
        self._attempt += 1
        try:
            self._send()
        except FarmError as error:
            self._failed(error)


def action_digest(request: StepRequest) -> bytes:
    """What tells a repeated action from another one under the same index."""
    if request.WhichOneof("action") == "text":
        flags = b"text1" if request.truncated else b"text0"
        action = request.text.SerializeToString(deterministic=True)
    else:
        flags, action = b"message", request.message.SerializeToString(deterministic=True)
    return bytes.fromhex(digest(flags, action, request.limit.encode()))


def answer(
    request: StepRequest, admitted: Admitted, ran: StepRan, limits: Limits, composition: Composition
) -> StepResponse:
    """The answer to ``request`` that follows from what the host did."""
    outcome = outcome_from_pb(ran.outcome) if ran.done else None
    parts, reward = composition(
        StepContext(
            index=request.index,
            limits=limits,
            message=admitted.message,
            results=tuple([result_from_pb(r) for r in ran.results]),
            progress_before=ran.progress_before if ran.HasField("progress_before") else None,
            progress_after=ran.progress_after if ran.HasField("progress_after") else None,
            completion=ran.completion if ran.HasField("completion") else None,
            repeated_calls=ran.repeated_calls,
            sampled_tokens=request.sampled_tokens if request.HasField("sampled_tokens") else None,
            done=ran.done,
            outcome=outcome,
            signals=parts_from_pb(ran.signals),
        )
    )
    response = StepResponse(
        index=request.index,
        messages=ran.messages,
        results=ran.results,
        parts=parts_to_pb(parts),
        reward=reward,
        done=ran.done,
        diagnosis=DIAGNOSIS_TO_PB[admitted.message.diagnosis],
        seconds=ran.seconds,
    )
    if ran.done:
        response.outcome.CopyFrom(ran.outcome)
    if request.HasField("text"):
        response.message.CopyFrom(assistant_to_pb(admitted.message))
    return response


def lost(request: StepRequest, cause: str, composition: Composition | None = None) -> StepResponse:
    """The answer when the farm has lost the episode: over, with its cause, and without any reward."""
    names = composition.names if composition is not None else ()
    return StepResponse(
        index=request.index,
        done=True,
        outcome=outcome_to_pb(Outcome.infra_failed(cause)),
        parts=parts_to_pb(dict.fromkeys(names)),
        diagnosis=request.message.diagnosis or DIAGNOSIS_TO_PB[Diagnosis.NONE],
    )
