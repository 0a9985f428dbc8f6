"""One request to a persistent interpreter, and its answer.

The process was started with its errors apart: what it runs writes into that stream, and the interpreter itself answers
in the other, which nothing that it runs has a hand on. An answer is a line of a word that was drawn for this request,
and a number. So nothing that is printed is taken for the answer, or gets lost in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Sequence

from envfarm.core.errors import ToolError
from envfarm.core.sandbox import SandboxProcess
from sandboxes.isolation.processes.output import HeadTail

FLOOD_BYTES = 64 * 1024 * 1024  # of output, at which a request is stopped
_LINE_BYTES = 4096
_DRAINED_AT_ONCE = 64  # reads
GRACE_SECONDS = 0.5
_LAST_WORDS_SECONDS = 2.0


def new_word() -> str:
    """The word of one request."""
    return secrets.token_hex(8)


class Answers:
    """Finds the answer with ``word`` in a stream, in bounded memory, whatever else is in it."""

    def __init__(self, word: str) -> None:
        self._word = word.encode()
        self._line = b""
        self.status: int | None = None

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        *lines, self._line = (self._line + data).split(b"\n")
        self._line = self._line[:_LINE_BYTES]
        for line in lines:
            word, _, number = line.partition(b" ")
            if word == self._word and number.isdigit() and len(number) < 10:
                self.status = int(number)


class Exchange:
    """A request while it is served. ``status``: the answer, ``None`` when there was none."""

    def __init__(self, process: SandboxProcess, limit: int) -> None:
        self._process = process
        self.word = new_word()
        self.output = HeadTail(limit)
        self.stopped = False
        self.flooded = False
        self._answers = Answers(self.word)
        self._deaf = False  # the stream of answers has ended
        self._over = asyncio.Event()

    @property
    def status(self) -> int | None:
        """The number that was answered."""
        return self._answers.status

    async def run(self, request: bytes, seconds: float, interrupts: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Send ``request`` and wait for its answer.

        When ``seconds`` are over, or too much was written, ``interrupts`` are tried one after the other until it
        answers. Cancelled, it kills the process, since nobody knows what that is at.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                listening = [tasks.create_task(self._hear()), tasks.create_task(self._collect())]
                try:
                    await self._serve(request, seconds, interrupts)
                    if self._deaf and self.status is None and self._process.exit_code is None:
                        # It became another program, which may have something to say.
                        await asyncio.wait(listening[1:], timeout=seconds)
                    elif self._deaf and self.status is None:
                        await asyncio.wait(listening[1:], timeout=_LAST_WORDS_SECONDS)
                finally:
                    for task in listening:
                        task.cancel()
        except BaseException:
            self._process.kill()
            raise
        self._drain()

    async def _serve(self, request: bytes, seconds: float, interrupts: Sequence[Callable[[], Awaitable[None]]]) -> None:
        with contextlib.suppress(TimeoutError, ToolError):
            async with asyncio.timeout(seconds):
                await self._process.write(request)
                await self._over.wait()
        for interrupt in interrupts:
            if self.status is not None or self._deaf:
                return
            self.stopped = True
            self._over.clear()
            await interrupt()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_SECONDS):
                    await self._over.wait()

    async def _hear(self) -> None:
        while data := await self._process.read():
            self._answers.feed(data)
            if self.status is not None:
                self._over.set()
                return
        self._deaf = True
        self._over.set()

    async def _collect(self) -> None:
        while data := await self._process.read_errors():
            self.output.feed(data)
            if self.output.total > FLOOD_BYTES and not self.flooded:
                self.flooded = True
                self._over.set()

    def _drain(self) -> None:
        """What was written ahead of the answer is there by now."""
        for _ in range(_DRAINED_AT_ONCE):
            data = self._process.errors_now()
            if not data:
                return
            self.output.feed(data)
