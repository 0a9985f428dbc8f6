"""One step of one episode: run its calls, place the results, measure, decide whether the episode is over."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from envfarm.core.errors import EnvironmentCodeError, FarmError, SandboxError, ToolError
from envfarm.core.messages import ToolStatus
from envfarm.core.outcome import Outcome
from envfarm.tools.schema import call_arguments
from envfarm.wire.convert.enums import STATUS_TO_PB, outcome_to_pb
from envfarm.wire.v1 import host_pb2, types_pb2
from sandboxes.host.instance import Instance, as_number, as_unit, show_traceback
from sandboxes.host.results import NotJson, as_text, cut, exception_text
from sandboxes.host.runner import CallOverdue, Job, Pending, Steps, awaited
from sandboxes.host.work import Work

_OK, _ERROR, _INVALID, _TIMEOUT = (
    STATUS_TO_PB[s] for s in (ToolStatus.OK, ToolStatus.ERROR, ToolStatus.INVALID, ToolStatus.TIMEOUT)
)


class EpisodeState:
    """What steps of one episode have in common."""

    __slots__ = ("environment", "expires", "instance", "limits", "made", "progress", "stuck", "tools")

    def __init__(self, instance: Instance, progress: float | None, expires: float) -> None:
        self.instance = instance
        self.environment = instance.environment
        self.tools = instance.tools
        self.limits = instance.loaded.limits
        self.progress = progress
        self.expires = expires  # monotonic: end of the episode's wall time
        self.made: set[tuple[str, bytes]] = set()  # calls of earlier steps
        self.stuck: list[Any] = []  # threads given up inside a tool


class Step(Work):
    """Runs a ``RunStep``; its result is the reply. Never raises for what environment code does."""

    def __init__(self, state: EpisodeState, request: host_pb2.RunStep) -> None:
        super().__init__(state.instance.loaded.name)
        self.state = state
        self.request = request
        self.limits = state.limits
        self.calls = {call.id: call for call in request.calls}
        self.results = {result.call_id: result for result in request.results}
        self.order = list(request.order) or [*self.results, *self.calls]
        self.position = 0
        self.ended_by = ""
        self.call_started = 0.0
        self.started = time.monotonic()
        self.reply = host_pb2.SlotReply(ran=host_pb2.StepRan())
        self.ran = self.reply.ran

    def run(self, job: Job) -> Steps:
        """Returns the ``SlotReply``, its ``ran`` filled in."""
        try:
            self._after_abandonment()
            while self.position < len(self.order):
                call_id = self.order[self.position]
                if call_id in self.calls and call_id not in self.results:
                    yield from self._run_call(job, self.calls[call_id])
                self.position += 1
            self._count_repeats()
            yield from self._answer(job)
        except FarmError as error:
            self._broken(error)
        except Exception as error:  # a fault of ours must not end as a reward either
            show_traceback(self.name, "a step")
            self._broken(EnvironmentCodeError(f"environment {self.name!r}: {exception_text(error)}"))
        self.ran.seconds = time.monotonic() - self.started
        return self.reply

    def _broken(self, error: FarmError) -> None:
        self.ran.done = True
        self.ran.ClearField("completion")
        self.ran.outcome.CopyFrom(outcome_to_pb(Outcome.infra_failed(str(error))))

    def _after_abandonment(self) -> None:
        """Continue behind a call whose thread was given up."""
        thread, self.stuck = self.stuck, None
        if thread is None:
            return
        self.state.stuck.append(thread)
        if self.doing != "call":
            raise EnvironmentCodeError(
                f"environment {self.name!r}: {self.doing} took longer than its {self.seconds:g} s and cannot be stopped"
            )
        if len(self.state.stuck) > 1:
            raise EnvironmentCodeError(f"environment {self.name!r}: a second tool call hangs and cannot be stopped")
        self._overdue(self.calls[self.order[self.position]])
        self.position += 1

    # Calls

    def _count_repeats(self) -> None:
        made = [(call.name, _canonical(call.arguments)) for call in self.calls.values()]
        self.ran.repeated_calls = sum(key in self.state.made for key in made)
        self.state.made.update(made)

    def _run_call(self, job: Job, call: types_pb2.ToolCall) -> Steps:
        name = call.name
        self.call_started = time.monotonic()
        if self.ended_by:
            self._note(call.id, name, _INVALID, f"error: not run, because {self.ended_by} ended the episode")
            return
        found = self.state.tools.get(name)
        if found is None:
            self._note(call.id, name, _INVALID, f"error: there is no tool named {name!r}")
            return
        function, mark = found
        self.doing, self.seconds = "call", mark.timeout_s or self.limits.tool_seconds
        try:
            arguments = call_arguments(function, call.arguments)
        except ToolError as error:
            self._note(call.id, name, _INVALID, str(error))
            return
        try:
            value = job.call(function, self.seconds, (), arguments)
            if awaited(value):
                value = yield Pending(value, self.seconds)
            text = as_text(value)
        except Exception as error:  # user code: its fault is the call's result
            self._failed(call, error)
        else:
            self._note(call.id, name, _OK, text)
            if mark.ends:
                self.ended_by = name

    def _failed(self, call: types_pb2.ToolCall, error: Exception) -> None:
        if isinstance(error, SandboxError):
            raise error  # the farm's fault, not the tool's answer
        if isinstance(error, CallOverdue):
            self._overdue(call)
        elif isinstance(error, ToolError | NotJson):
            self._note(call.id, call.name, _ERROR, str(error))
        else:
            show_traceback(self.name, f"tool {call.name}")
            self._note(call.id, call.name, _ERROR, f"error: {exception_text(error)}")

    def _overdue(self, call: types_pb2.ToolCall) -> None:
        text = f"error: {call.name} gave no answer within {self.seconds:g} s"
        self._note(call.id, call.name, _TIMEOUT, text)

    def _note(self, call_id: str, name: str, status: Any, text: str) -> None:
        content, was_cut = cut(text, self.limits.result_bytes)
        self.results[call_id] = types_pb2.ToolResult(
            call_id=call_id,
            name=name,
            status=status,
            content=content,
            truncated=was_cut,
            seconds=time.monotonic() - self.call_started,
        )

    # The answer

    def _answer(self, job: Job) -> Steps:
        request, ran, environment = self.request, self.ran, self.state.environment
        results = [self.results[i] for i in self.order if i in self.results]
        ran.results.extend(results)
        for r in results:
            ran.messages.add(role="tool", content=r.content, tool_call_id=r.call_id, name=r.name)
        outcome = Outcome.completed() if self.ended_by else None
        if request.malformed:
            ran.messages.append(types_pb2.Message(role="user", content=request.malformed))
        elif not results and not request.limit:  # what a limit cut off is not a last word
            outcome = yield from self._reply(job)
        before = self.state.progress
        if before is not None:
            ran.progress_before = before
        if self.state.instance.loaded.has_progress:
            yield from self._measure_progress(job)
        if environment.rewards:
            yield from self._measure_signals(job)
        outcome = outcome or self._limit()
        if outcome is None:
            return
        seconds = self.limits.verify_seconds
        value = as_unit(self.name, "verify", (yield from self.ask(job, "verify", environment.verify, seconds)))
        if value is not None:
            ran.completion = value
        ran.done = True
        ran.outcome.CopyFrom(outcome_to_pb(outcome))

    def _reply(self, job: Job) -> Steps:
        """The simulated user's answer; the outcome when there is none."""
        reply = self.state.environment.reply
        answer = yield from self.ask(job, "reply", reply, self.limits.tool_seconds, self.request.content)
        if answer is None:
            return Outcome.completed()
        if not isinstance(answer, str):
            raise EnvironmentCodeError(
                f"environment {self.name!r}: reply returned {type(answer).__name__}, expected str or None"
            )
        content, _ = cut(answer, self.limits.message_bytes)
        self.ran.messages.append(types_pb2.Message(role="user", content=content))
        return None

    def _limit(self) -> Outcome | None:
        if self.request.limit:
            return Outcome.truncated(self.request.limit)
        if self.request.index + 1 >= self.limits.steps:
            return Outcome.truncated("steps")
        if time.monotonic() >= self.state.expires:
            return Outcome.truncated("time")
        return None

    def _measure_progress(self, job: Job) -> Steps:
        progress = self.state.environment.progress
        value = yield from self.ask(job, "progress", progress, self.limits.tool_seconds)
        after = self.state.progress = as_unit(self.name, "progress", value)
        if after is not None:
            self.ran.progress_after = after

    def _measure_signals(self, job: Job) -> Steps:
        environment = self.state.environment
        for name, function in environment.rewards.items():
            what = f"reward {name}"
            value = yield from self.ask(job, what, function, self.limits.tool_seconds, environment)
            part = self.ran.signals.add(name=name)
            number = as_number(self.name, what, value)
            if number is not None:
                part.value = number


def _canonical(arguments: str) -> bytes:
    """JSON text with sorted keys and no spaces, so that equal calls have equal bytes."""
    try:
        return msgspec.json.encode(msgspec.json.decode(arguments), order="sorted")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments.encode("utf-8", "replace")
