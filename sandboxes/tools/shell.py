"""A shell for models: one bash per episode, kept from call to call.

The tool is called ``bash``, with ``command`` and ``restart``, as in most public agents with a kept shell, so that a
policy which has seen one knows this one.
"""

from __future__ import annotations

from envfarm.core.environment import Toolset, tool
from envfarm.core.errors import ToolError
from envfarm.core.sandbox import SandboxProcess
from sandboxes.tools.exchange import FLOOD_BYTES, GRACE_SECONDS, Exchange
from sandboxes.tools.kept_process import KeptProcess, ending, missing, time_limit
from sandboxes.tools.shell_lines import BECOME, HELLO, KINDS, answer_line, command_lines, new_pipe_lines, take_pipe_line
from sandboxes.tools.transcript import transcript

_START_SECONDS = 5.0
_ABORT = 10  # SIGUSR1, see shell_lines
_INTERRUPTED = 130


class Shell(Toolset):
    """A persistent bash session, or ``sh`` where an image has no bash.

    ``seconds``: of one command (default: what profile and limits allow, less what stopping it may take).
    ``output_bytes``: of UTF-8 that are shown of its output (default: what ``Limits.result_bytes`` leaves).
    """

    executes = True

    def __init__(self, *, seconds: float | None = None, output_bytes: int | None = None) -> None:
        self._seconds = seconds
        self._output_bytes = output_bytes
        self._kept = KeptProcess()
        self._kind = ""
        self._status = 0

    def reset(self) -> None:
        """The session ends with the episode."""
        self._kept.forget()
        self._status = 0

    @tool
    async def bash(self, command: str = "", restart: bool = False) -> str:
        """Run a command in a bash shell. Working folder, variables and functions are kept from call to call.

        There is no terminal and nobody to type: programs that ask for input get none. Put what takes long into the
        background and send its output to a file, as in `make > make.log 2>&1 &`.

        Args:
            command: What to run; it may have several lines.
            restart: Set to true to end the shell, with all that it runs, and begin a new one.
        """
        async with self._kept.call():
            if restart:
                await self._kept.close()
                await self._started()
                return "The shell was restarted."
            if not command.strip():
                raise ToolError("error: there is no command to run; give one, or set restart to true")
            if "\0" in command:
                raise ToolError("error: a command cannot contain the character NUL")
            return await self._run(command)

    async def _run(self, command: str) -> str:
        process = await self._started()
        limit = self._output_bytes or max(1024, self.environment.limits.result_bytes - 512)
        spare = process.children()
        lines = await self._fresh_output(process) if spare else ""
        while process.errors_now():
            pass  # of jobs that earlier commands left and that have ended since
        exchange = Exchange(process, limit - 256)
        seconds = self._seconds or time_limit(self)
        again = answer_line(exchange.word).encode()

        async def stop() -> None:
            process.signal(_ABORT)
            await process.kill_children(spare)

        async def ask_again() -> None:  # some shells throw away what is sent ahead of an interruption
            if process.exit_code is None:
                await process.write(again)

        request = lines + command_lines(self._kind, command, self._status) + answer_line(exchange.word)
        await exchange.run(request.encode("utf-8", "replace"), seconds, (stop, ask_again, stop, ask_again))
        return await self._told(exchange, limit - 256, seconds)

    async def _told(self, exchange: Exchange, limit: int, seconds: float) -> str:
        said = transcript(exchange.output, limit).rstrip("\n")
        parts = [said] if said.strip() else []
        if exchange.stopped:
            why = f"more than {FLOOD_BYTES} bytes of output" if exchange.flooded else f"time limit of {seconds:g} s"
            parts.append(f"[stopped: {why}; what the command started was killed]")
        if exchange.status is None:
            code = await self._kept.close(ends=not exchange.stopped)
            self._status = 0
            how = "did not stop either and was killed" if exchange.stopped else ending("became another program", code)
            parts.append(
                f"[the shell {how}; the next call starts a new one: working folder, variables and functions are "
                "reset, files are kept]"
            )
        else:
            self._status = _INTERRUPTED if exchange.stopped else exchange.status
            if exchange.status and not exchange.stopped:
                parts.append(f"[exit code {exchange.status}]")
        return "\n".join(parts) or "(no output)"

    async def _started(self) -> SandboxProcess:
        running = self._kept.running
        if running is not None:
            return running
        self._status = 0
        process = await self._kept.start(self.sandbox, ["sh", "-c", BECOME])
        exchange = Exchange(process, 1024)
        await exchange.run((HELLO + answer_line(exchange.word, "$kind")).encode(), _START_SECONDS, ())
        self._kind = KINDS.get(exchange.status or 0, "")
        if not self._kind:
            code = await self._kept.close(ends=True)
            said = transcript(exchange.output, 1024).strip()
            if missing(code, said):
                raise ToolError("error: there is no shell in this sandbox: its image has neither bash nor sh")
            raise ToolError(f"error: the shell could not be started: {said or ending('gave no answer', code)}")
        return process

    async def _fresh_output(self, process: SandboxProcess) -> str:
        """Have commands write where jobs of earlier ones do not, whose output would get mixed up with theirs."""
        exchange = Exchange(process, 1024)
        await exchange.run((new_pipe_lines(self._kind) + answer_line(exchange.word)).encode(), GRACE_SECONDS, ())
        return take_pipe_line(followed=exchange.status == 0 and process.follow_errors(7))
