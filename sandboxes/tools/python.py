"""Python for models: one interpreter per episode, kept from call to call, as in a notebook."""

from __future__ import annotations

import signal
from pathlib import Path

from envfarm.core.environment import Toolset, tool
from envfarm.core.errors import IsolationError, ToolError
from envfarm.core.sandbox import SandboxProcess
from sandboxes.tools.exchange import FLOOD_BYTES, Exchange
from sandboxes.tools.interpreter import interpreter
from sandboxes.tools.kept_process import KeptProcess, ending, missing, time_limit
from sandboxes.tools.transcript import transcript

_SOURCE = Path(__file__).with_name("python_inside.py").read_text()
_PROGRAM = f"exec(compile({_SOURCE!r}, '<session>', 'exec'))"  # under a name that the code's own frames do not have
_START_SECONDS = 5.0
_DEAF = 125


class Python(Toolset):
    """One tool that runs code. With an image, in the image's own ``python3``, which it must have.

    ``seconds``: of one call (default: what profile and limits allow, less what stopping it may take). ``output_bytes``:
    of UTF-8 that are shown of its output (default: what ``Limits.result_bytes`` leaves).
    """

    executes = True

    def __init__(self, *, seconds: float | None = None, output_bytes: int | None = None) -> None:
        self._seconds = seconds
        self._output_bytes = output_bytes
        self._kept = KeptProcess()

    def reset(self) -> None:
        """The session ends with the episode."""
        self._kept.forget()

    @tool
    async def python(self, code: str) -> str:
        """Run Python code and return what it prints and the value of its last expression.

        Variables, functions and imports are kept from call to call. There is no input to read.

        Args:
            code: The program. It has the standard library, no network, and a folder of its own.
        """
        async with self._kept.call():
            return await self._run(code)

    async def _run(self, code: str) -> str:
        process = self._kept.running or await self._started()
        limit = (self._output_bytes or max(1024, self.environment.limits.result_bytes - 512)) - 256
        spare = process.children()
        exchange = Exchange(process, limit)
        source = code.encode("utf-8", "replace")

        async def interrupt() -> None:
            process.signal(signal.SIGINT)

        async def interrupt_all() -> None:
            await process.kill_children(spare)
            process.signal(signal.SIGINT)

        seconds = self._seconds or time_limit(self)
        request = b"%s %d\n" % (exchange.word.encode(), len(source)) + source
        await exchange.run(request, seconds, (interrupt, interrupt_all))
        if exchange.stopped and exchange.status is not None:
            await process.kill_children(spare)
        return await self._told(exchange, limit, seconds)

    async def _started(self) -> SandboxProcess:
        """An interpreter that has answered. One that cannot is told from what code does, which did not run yet."""
        argv = [interpreter(self), "-I", "-B", "-X", "utf8", "-c", _PROGRAM]
        process = await self._kept.start(self.sandbox, argv)
        exchange = Exchange(process, 1024)
        await exchange.run(b"%s 0\n" % exchange.word.encode(), _START_SECONDS, ())
        if exchange.status is not None:
            return process
        code = await self._kept.close(ends=True)
        said = transcript(exchange.output, 1024).strip()
        if missing(code, said):
            self._missing()
        raise ToolError(f"error: Python could not be started: {said or ending('gave no answer', code)}")

    async def _told(self, exchange: Exchange, limit: int, seconds: float) -> str:
        said = transcript(exchange.output, limit).rstrip("\n")
        code = None
        if exchange.status is None:
            code = await self._kept.close(ends=not exchange.stopped)
        parts = [said] if said.strip() else []
        if exchange.stopped:
            why = f"more than {FLOOD_BYTES} bytes of output" if exchange.flooded else f"time limit of {seconds:g} s"
            parts.append(f"error: stopped: {why}")
        if exchange.status is None:
            how = ending("became another program", code)
            if exchange.stopped or code == _DEAF:
                how = "did not stop either and was killed" if exchange.stopped else "lost its own descriptors"
            parts.append(f"error: Python {how}; the next call starts it anew, without variables; files are kept")
        return "\n".join(parts) or "(no output)"

    def _missing(self) -> None:
        if self.environment.profile.image:
            raise ToolError(f"error: there is no python3 in the image {self.environment.profile.image}")
        raise IsolationError(f"{interpreter(self)} cannot be reached from inside the sandbox")
