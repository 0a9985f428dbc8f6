"""One step on its way through the gateway: admitted, sent to the host, composed into an answer. No task, no state.

The answer is a pure function of the request and the host's stored reply, so a step that is sent again is answered
again with the same words and the same reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType

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
from envfarm.wire.convert.messages import fill_assistant, result_from_pb, result_to_pb
from envfarm.wire.convert.tasks import parts_from_pb
from envfarm.wire.retry import backoff
from envfarm.wire.v1.episode_pb2 import StepRequest, StepResponse
from envfarm.wire.v1.host_pb2 import SlotCommand, SlotReply, StepRan

StepDone = Callable[[FarmError | None], None]


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
    """One step in flight: ``done`` is called once, after ``response`` has been filled or with the error instead.

    Messages are filled in place: protobuf's constructors copy what they are given, which costs more than all the rest.
    """

    __slots__ = ("_admitted", "_attempt", "_command", "_done", "_ends", "_known", "_link", "_recover", "_request",
                 "_response", "_served")  # fmt: skip

    def __init__(
        self,
        known: Known,
        served: Served,
        request: StepRequest,
        response: StepResponse,
        ends: float,
        done: StepDone,
        recover: Callable[[StepInFlight], None],
    ) -> None:
        """``ends`` is the deadline on the clock of the event loop; ``recover`` has :meth:`resend` run as a task."""
        self._known = known
        self._served = served
        self._request = request
        self._response = response
        self._ends = ends
        self._done = done
        self._recover = recover
        self._attempt = 0

    def begin(self, link: HostLink) -> None:
        """Admit the action and send it. Raises :class:`ConfigError` for an action that no policy could have sent."""
        request = self._request
        self._link = link
        self._admitted = admitted = admit(request, self._served)
        self._command = SlotCommand()
        run = self._command.step
        run.episode_id = self._known.seat.episode_id
        run.index = request.index
        run.digest = action_digest(request)
        run.content = admitted.message.content
        run.order.extend([call.id for call in admitted.message.tool_calls])
        for call in admitted.runnable:
            run.calls.add(id=call.id, name=call.name, arguments=call.arguments)
        if admitted.invalid:
            run.results.extend([result_to_pb(result) for result in admitted.invalid])
        if request.limit:
            run.limit = request.limit
        if admitted.malformed:
            run.malformed = admitted.malformed
        self._send()

    def _send(self) -> None:
        self._link.submit(self._command, self._left(), self._replied)

    def _left(self) -> float:
        return self._ends - asyncio.get_running_loop().time()

    def _replied(self, reply: SlotReply | FarmError) -> None:
        if isinstance(reply, FarmError):
            self._failed(reply)
            return
        fill_answer(
            self._response, self._request, self._admitted, reply.ran, self._served.limits, self._known.composition
        )
        self._done(None)

    def _failed(self, error: FarmError) -> None:
        if isinstance(error, Unavailable):
            self._recover(self)  # the host may live: its stored reply tells whether the step ran
        elif isinstance(error, SlotLost):
            self._lost(f"the slot is gone: {error}")
        elif isinstance(error, SandboxError | EnvironmentCodeError):
            self._lost(str(error))
        else:
            self._done(error)

    def _lost(self, cause: str) -> None:
        fill_lost(self._response, self._request, cause, self._known.composition)
        self._done(None)

    @property
    def environment(self) -> str:
        """Whose step it is."""
        return self._served.info.name

    async def resend(self) -> HostLink | None:
        """Send the step again once its host answers; end the episode when it does not, and return the lost host."""
        try:
            async with asyncio.timeout(self._left()):
                alive = await self._link.recovered()
                if alive:
                    await asyncio.sleep(backoff(self._attempt))
        except TimeoutError:
            self._done(DeadlineExceeded(f"host {self._link.host.id} did not come back in time"))
            return None
        if not alive:
            self._lost(f"host {self._link.host.id} was lost: {self._link.cause or 'it left'}")
            return self._link
        self._attempt += 1
        try:
            self._send()
        except FarmError as error:
            self._failed(error)
        return None


def action_digest(request: StepRequest) -> bytes:
    """What tells a repeated action from another one under the same index."""
    if request.HasField("text"):
        flags = b"text1" if request.truncated else b"text0"
        action = request.text.SerializeToString(deterministic=True)
    else:
        flags, action = b"message", request.message.SerializeToString(deterministic=True)
    return bytes.fromhex(digest(flags, action, request.limit.encode()))


_NO_SIGNALS: Mapping[str, float | None] = MappingProxyType({})


def fill_answer(
    response: StepResponse,
    request: StepRequest,
    admitted: Admitted,
    ran: StepRan,
    limits: Limits,
    composition: Composition,
) -> None:
    """The answer to ``request`` that follows from what the host did: a pure function of the other arguments."""
    done = ran.done
    outcome = outcome_from_pb(ran.outcome) if done else None
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
            done=done,
            outcome=outcome,
            signals=parts_from_pb(ran.signals) if ran.signals else _NO_SIGNALS,
        )
    )
    response.index = request.index
    response.diagnosis = DIAGNOSIS_TO_PB[admitted.message.diagnosis]
    response.seconds = ran.seconds
    add = response.messages.add
    for message in ran.messages:
        add().CopyFrom(message)
    add_result = response.results.add
    for result in ran.results:
        add_result().CopyFrom(result)
    _fill_parts(response, parts)
    if reward is not None:
        response.reward = reward
    if done:
        response.done = True
        response.outcome.CopyFrom(ran.outcome)
    if request.HasField("text"):
        fill_assistant(response.message, admitted.message)


def fill_lost(response: StepResponse, request: StepRequest, cause: str, composition: Composition) -> None:
    """The answer when the farm has lost the episode: over, with its cause, and without any reward."""
    response.index = request.index
    response.done = True
    response.outcome.CopyFrom(outcome_to_pb(Outcome.infra_failed(cause)))
    response.diagnosis = request.message.diagnosis or DIAGNOSIS_TO_PB[Diagnosis.NONE]
    _fill_parts(response, dict.fromkeys(composition.names))


def _fill_parts(response: StepResponse, parts: Mapping[str, float | None]) -> None:
    add = response.parts.add
    for name, value in parts.items():
        part = add()
        part.name = name
        if value is not None:
            part.value = value
