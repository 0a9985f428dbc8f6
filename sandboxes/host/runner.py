"""Runs environment code off the event loop at little more than the cost of calling it.

A *job* is a generator. Its plain code runs on a runner thread, many jobs after one wake-up; what it yields is awaited
on the code loop, then it goes on. One thread at a time takes jobs. A watchdog gives the queue a fresh thread when that
one is held up by a single job, interrupts a call that passes its limit, and abandons the thread when even that does
not help (code that sits in C), so that no other episode waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from queue import SimpleQueue
from typing import Any

from sandboxes.host.code_loop import Call, CodeLoop, Interrupt, raise_in

log = logging.getLogger(__name__)

HELD_UP_SECONDS = 0.02
TICK_SECONDS = 0.01
GRACE_SECONDS = 0.15
_PLAIN = frozenset({type(None), str, int, float, bool, list, dict, tuple, bytes})

Steps = Generator["Pending", Any, Any]
Done = Callable[[Any, BaseException | None], None]


class CallOverdue(Exception):
    """A call of environment code passed its limit. Raised inside the job, at the place of the call."""


class CodeExited(Exception):
    """Environment code tried to end the process."""


class _Abandoned(BaseException):
    """This thread came back from an overdue call too late: its job went on without it."""


class Pending:
    """What a job waits for, and for how long at most."""

    __slots__ = ("awaitable", "seconds")

    def __init__(self, awaitable: Awaitable[Any], seconds: float) -> None:
        self.awaitable = awaitable
        self.seconds = seconds


class Job:
    """One run of ``make(job)``. ``done(value, error)`` is called once, on the loop.

    When the thread inside a call must be given up, ``abandoned(thread)`` is called on the loop and ``make`` again, on
    another thread: the generator it returns continues from where its owner knows the old one was.
    """

    __slots__ = ("abandon", "abandoned", "deadline", "done", "generator", "interrupted", "lock", "make", "started")

    def __init__(
        self, make: Callable[[Job], Steps], done: Done, abandoned: Callable[[threading.Thread], None] | None = None
    ) -> None:
        self.make = make
        self.done = done
        self.abandoned = abandoned
        self.generator = make(self)
        self.lock = threading.Lock()
        self.deadline = 0.0  # of the call that runs now; 0: none does
        self.interrupted = 0.0  # when the watchdog raised the interrupt; 0: it has not
        self.abandon = False
        self.started = 0.0

    def invoke(self, function: Callable[..., Any], seconds: float, /, *args: Any, **kwargs: Any) -> Steps:
        """Call environment code, plain or async; raises what it raises, or :class:`CallOverdue`."""
        value = self.call(function, seconds, args, kwargs)
        return (yield Pending(value, seconds)) if awaited(value) else value

    def call(self, function: Callable[..., Any], seconds: float, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The plain part of :meth:`invoke`: what an async function gives is returned, to be yielded as ``Pending``."""
        self.deadline = time.monotonic() + seconds
        try:
            try:
                return function(*args, **kwargs)
            finally:
                with self.lock:  # after this no interrupt is raised
                    self.deadline = 0.0
                if self.abandon:
                    raise _Abandoned
                if self.interrupted:  # it was, or is about to be delivered: either way it ends here
                    raise_in(threading.get_ident(), None)
                    raise Interrupt
        except Interrupt:
            with self.lock:
                self.deadline = 0.0
            if self.abandon:
                raise _Abandoned from None
            self.interrupted = 0.0
            raise CallOverdue from None
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            raise CodeExited(f"{type(error).__name__}: {error}") from error


def awaited(value: Any) -> bool:
    """Whether a call has given something to wait for. Cheap for the values that tools usually return."""
    return type(value) not in _PLAIN and inspect.isawaitable(value)


class _Worker:
    """One runner thread and the job it is on."""

    __slots__ = ("job", "thread")

    def __init__(self) -> None:
        self.job: Job | None = None
        self.thread: threading.Thread


class Runner:
    """The queue, its threads and their watchdog. Use from one event loop; :meth:`close` when done."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: deque[tuple[Job, Any, BaseException | None]] = deque()
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._finished: deque[tuple[Job, Any, BaseException | None]] = deque()
        self._flush_asked = False
        self._waiting: set[asyncio.Task[None]] = set()
        self._workers: list[_Worker] = []
        self._ticking: asyncio.TimerHandle | None = None
        self._wake_asked = False
        self.unfinished = 0
        self._code = CodeLoop()
        self._primary: _Worker
        self._start_worker()

    @property
    def threads(self) -> int:
        """Runner threads that take or run jobs, abandoned ones not counted."""
        return len(self._workers)

    def submit(self, job: Job) -> None:
        """Run ``job``; jobs that are submitted in one turn of the loop start together."""
        self.unfinished += 1
        self._enqueue(job, None, None)

    async def close(self) -> None:
        """Stop taking jobs and cancel what is awaited. Threads are daemons: one that hangs does not hold the exit."""
        if self._ticking is not None:
            self._ticking.cancel()
        for task in list(self._waiting):
            task.cancel()
        if self._waiting:
            await asyncio.wait(self._waiting, timeout=1.0)
        for _ in self._workers:
            self._wake.put(False)
        await self._code.close()

    def _enqueue(self, job: Job, value: Any, error: BaseException | None) -> None:
        self._ready.append((job, value, error))
        if not self._wake_asked:
            self._wake_asked = True
            self._loop.call_soon(self._wake_primary)

    def _wake_primary(self) -> None:
        self._wake_asked = False
        self._wake.put(True)
        if self._ticking is None:
            self._ticking = self._loop.call_later(TICK_SECONDS, self._tick)

    # Runner threads

    def _start_worker(self) -> None:
        worker = _Worker()
        worker.thread = threading.Thread(target=self._work, args=(worker,), name="environment code", daemon=True)
        self._workers.append(worker)
        self._primary = worker  # before it runs: it leaves when it finds another in its place
        worker.thread.start()

    def _work(self, worker: _Worker) -> None:
        try:
            while self._wake.get():
                while self._primary is worker:
                    try:
                        entry = self._ready.popleft()
                    except IndexError:
                        break
                    self._run(worker, *entry)
                if self._primary is not worker:
                    self._wake.put(True)  # what woke this thread was meant for its successor
                    return
        except _Abandoned:
            return  # a worker that nobody counts on any more
        finally:
            self._tell(self._forget, worker)

    def _run(self, worker: _Worker, job: Job, value: Any, error: BaseException | None) -> None:
        job.started = time.monotonic()
        worker.job = job
        outcome: tuple[Job, Any, BaseException | None]
        try:
            if error is None:
                outcome = (job, job.generator.send(value), None)
            else:
                outcome = (job, job.generator.throw(error), None)
        except StopIteration as stop:
            outcome = (job, _Result(stop.value), None)
        except _Abandoned:
            raise
        except BaseException as failure:  # of the job; whatever it is, its owner gets it
            outcome = (job, None, failure)
        worker.job = None
        self._finished.append(outcome)
        if not self._flush_asked:
            self._flush_asked = True
            self._tell(self._flush)

    def _tell(self, callback: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for this any more
            self._loop.call_soon_threadsafe(callback, *args)

    # The loop's side

    def _forget(self, worker: _Worker) -> None:
        if worker in self._workers:
            self._workers.remove(worker)

    def _flush(self) -> None:
        self._flush_asked = False
        finished = self._finished
        while finished:
            job, value, error = finished.popleft()
            if error is None and type(value) is Pending:
                task = self._loop.create_task(self._await(job, value))
                self._waiting.add(task)
                task.add_done_callback(self._waiting.discard)
                continue
            self.unfinished -= 1
            try:
                job.done(value.value if type(value) is _Result else None, error)
            except Exception:
                log.exception("the end of a job could not be handled")

    async def _await(self, job: Job, pending: Pending) -> None:
        code = self._code
        call = code.start(pending.awaitable)
        try:
            await asyncio.wait([call.ended], timeout=pending.seconds)
            if not call.ended.done():
                await self._overdue_on(code, call)
                self._enqueue(job, None, CallOverdue())
                return
        finally:
            code.cancel(call)  # of no effect once it has ended
        value, error = call.ended.result()
        if error is not None and not isinstance(error, Exception):
            error = CodeExited(f"{type(error).__name__}: {error}".removesuffix(": "))
        self._enqueue(job, value, error)

    async def _overdue_on(self, code: CodeLoop, call: Call) -> None:
        """End an async call that passed its limit, whatever it does instead of waiting."""
        code.cancel(call)
        await asyncio.wait([call.ended], timeout=GRACE_SECONDS)
        if call.ended.done() or await code.answers(GRACE_SECONDS):
            return  # at worst a task that ignores its cancellation: it harms nobody else
        code.interrupt()
        await asyncio.wait([call.ended], timeout=GRACE_SECONDS)
        if not await code.answers(GRACE_SECONDS) and self._code is code:
            self._code = CodeLoop()

    def _tick(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            job = worker.job
            if job is None:
                continue
            if worker is self._primary and self._ready and now - job.started > HELD_UP_SECONDS:
                self._promote()
            if job.deadline and now > job.deadline:
                self._overdue(worker, job, now)
        self._ticking = self._loop.call_later(TICK_SECONDS, self._tick) if self.unfinished else None

    def _promote(self) -> None:
        self._start_worker()
        self._wake.put(True)

    def _overdue(self, worker: _Worker, job: Job, now: float) -> None:
        with job.lock:
            if not job.deadline or now <= job.deadline:
                return  # it has just come back
            if not job.interrupted:
                job.interrupted = now
                raise_in(worker.thread.ident or 0, Interrupt)
                return
            if now - job.interrupted < GRACE_SECONDS:
                return
            job.abandon = True
        self._forget(worker)
        if worker is self._primary:
            self._promote()
        if job.abandoned is not None:
            job.abandoned(worker.thread)
        successor = Job(job.make, job.done, job.abandoned)
        self._enqueue(successor, None, None)


class _Result:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value
