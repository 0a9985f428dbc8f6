"""What a slot does with its environment: open an episode, end it. Steps are in :mod:`sandboxes.host.step`."""

from __future__ import annotations

import threading
from typing import Any

from envfarm.core.deadline import Deadline
from envfarm.core.errors import EnvironmentCodeError, IsolationError
from envfarm.core.messages import Message
from envfarm.wire.convert.enums import ISOLATION_TO_PB
from envfarm.wire.convert.messages import message_to_pb
from envfarm.wire.convert.tasks import task_from_pb
from envfarm.wire.v1 import host_pb2
from sandboxes.host.environments import Loaded
from sandboxes.host.instance import Instance, as_messages, as_unit, ask, hung, show_traceback
from sandboxes.host.runner import Done, Job, Runner, Steps
from sandboxes.isolation.sandbox import SlotSandbox

CLOSE_SECONDS = 10.0


class Work:
    """A job of one slot. ``stuck`` is the thread inside a call that had to be given up, while ``doing`` names it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.doing = ""
        self.seconds = 0.0
        self.stuck: threading.Thread | None = None

    def start(self, runner: Runner, done: Done) -> None:
        """Run it; ``done`` gets what :meth:`run` returns, or the error."""
        runner.submit(Job(self.run, done, self._given_up))

    def run(self, job: Job) -> Steps:
        """The work itself; begun again on another thread after one was given up."""
        raise NotImplementedError

    def ask(self, job: Job, what: str, function: Any, seconds: float, *args: Any) -> Steps:
        """Call a method of the environment, noting what is being done."""
        self.doing, self.seconds = what, seconds
        return (yield from ask(job, self.name, what, function, seconds, *args))

    def _given_up(self, thread: threading.Thread) -> None:
        self.stuck = thread


class Opening(Work):
    """Makes or reuses an instance and resets it. Its result is the first reply and the first potential."""

    def __init__(
        self, loaded: Loaded, sandbox: SlotSandbox, instance: Instance | None, request: host_pb2.AcquireSlot
    ) -> None:
        super().__init__(loaded.name)
        self.loaded = loaded
        self.sandbox = sandbox
        self.instance = instance
        self.request = request

    def run(self, job: Job) -> Steps:
        """Returns a ``SlotAcquired``."""
        if self.stuck is not None:
            raise hung(self.name, self.doing, self.seconds)
        if self.loaded.refusal:
            raise IsolationError(self.loaded.refusal)
        limit = self.loaded.limits.reset_seconds
        deadline = Deadline.after(min(self.request.timeout_s or limit, limit))
        task = task_from_pb(self.request.task)
        if self.loaded.executes:
            self.sandbox.prepare()
        if self.instance is None:
            self.instance = yield from self.ask(
                job, "making it", Instance, deadline.remaining(), self.loaded, self.sandbox
            )
        if task.files:
            self.sandbox.fill(task.files)
        for toolset in self.instance.toolsets:
            what = f"reset of {type(toolset).__name__}"
            yield from self.ask(job, what, toolset.reset, deadline.remaining())
        environment = self.instance.environment
        environment.seed = self.request.seed
        first = yield from self.ask(job, "reset", environment.reset, deadline.remaining(), task)
        messages = as_messages(self.name, self.loaded.cls.system_prompt, first)
        progress = None
        if self.loaded.has_progress:
            value = yield from self.ask(job, "progress", environment.progress, deadline.remaining())
            progress = as_unit(self.name, "progress", value)
        return host_pb2.SlotAcquired(
            messages=[_to_pb(self.name, m) for m in messages],
            isolation=ISOLATION_TO_PB[self.loaded.isolation],
            progress=progress,
        )


class Closing(Work):
    """Ends an episode, as far as environment code is concerned. Returns why the instance must not be used again."""

    def __init__(self, name: str, instance: Instance | None) -> None:
        super().__init__(name)
        self.instance = instance
        self.dirty = ""

    def run(self, job: Job) -> Steps:
        """Returns a sentence, empty when the instance may serve another episode."""
        if self.stuck is not None:
            self.dirty = str(hung(self.name, self.doing, self.seconds))
        elif self.instance is not None:
            try:
                yield from self.ask(job, "close", self.instance.environment.close, CLOSE_SECONDS)
            except Exception as error:  # user code: the instance is not used again
                self.dirty = str(error)
        return self.dirty


def _to_pb(name: str, message: Message) -> Any:
    try:
        return message_to_pb(message)
    except (TypeError, ValueError) as error:
        show_traceback(name, "reset")
        raise EnvironmentCodeError(
            f"environment {name!r}: reset returned a message that cannot be sent: {error}"
        ) from error
