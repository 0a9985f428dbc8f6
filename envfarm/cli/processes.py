"""Child processes of a command: started in a session of their own, ready when they say so, ended in order.

Each child writes a log file. When one dies, whoever waits gets a ``ProcessDied`` with the end of that log. The kernel
ends the children when this process is killed (``PR_SET_PDEATHSIG``), so nothing is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from envfarm.core.errors import ConfigError, DeadlineExceeded, FarmError

_PR_SET_PDEATHSIG = 1
GRACE_SECONDS = 25.0  # a gateway ends its hosts within this; children that are well need a fraction of a second
NOTICE_SECONDS = 0.3


class ProcessDied(FarmError):
    """A child process ended although it should run; the message has the end of its log."""

    code = "process_died"


def envfarm_argv(*words: str) -> list[str]:
    """Command line that runs ``envfarm WORDS`` with this very interpreter."""
    return [sys.executable, "-m", "envfarm.cli.main", *words]


def _die_with_parent() -> Callable[[], None]:
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def before_exec() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before prctl took hold
            os._exit(1)

    return before_exec


class Child:
    """One running child: its name, its process, its log file and, once it is ready, its address."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path, address_file: Path | None) -> None:
        self.name = name
        self.process = process
        self.log = log
        self._address_file = address_file

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self.process.returncode is None

    def death(self) -> ProcessDied:
        """The error that tells how this child ended and what it last wrote."""
        lines = self.log.read_text(errors="replace").splitlines()[-12:] if self.log.exists() else []
        tail = "\n  ".join(lines) or "(it wrote nothing)"
        return ProcessDied(
            f"{self.name} ended with status {self.process.returncode}; its log {self.log} ends with:\n  {tail}"
        )

    async def ready(self, seconds: float) -> str:
        """Wait until the child has written its address; returns it."""
        if self._address_file is None:
            raise FarmError(f"{self.name} was started without an address file")
        try:
            async with asyncio.timeout(seconds):
                while not self._address_file.exists():
                    if not self.running:
                        raise self.death()
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise DeadlineExceeded(f"{self.name} is not ready after {seconds:.0f} s; see {self.log}") from None
        return self._address_file.read_text().strip()

    async def stop(self, grace: float) -> None:
        """SIGTERM, then SIGKILL to the whole session after ``grace`` seconds."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self.process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()


class Processes:
    """Starts children, and ends them, last started first. Made by :func:`processes`."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._logs = state / "logs"
        self._children: list[Child] = []

    async def start(
        self, name: str, argv: Sequence[str], *, addressed: bool = True, env: dict[str, str] | None = None
    ) -> Child:
        """Start ``argv``; when ``addressed``, ``--address-file`` is added and :meth:`Child.ready` waits for it."""
        address_file = self._state / f"{name}.address" if addressed else None
        words = list(argv)
        if address_file is not None:
            address_file.unlink(missing_ok=True)
            words += ["--address-file", str(address_file)]
        log = self._logs / f"{name}.log"
        with log.open("ab") as sink:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=_die_with_parent(),
            )
        child = Child(name, process, log, address_file)
        self._children.append(child)
        return child

    def pid(self, name: str) -> int:
        """Process id of the child ``name``."""
        return next(child.process.pid for child in self._children if child.name == name)

    async def watch(self) -> None:
        """Run until a child fails, then raise its :class:`ProcessDied`; one that ends with status 0 was done."""
        while True:
            self.raise_death()
            await asyncio.sleep(0.1)

    def raise_death(self) -> None:
        """Raises the :class:`ProcessDied` of the first child that failed; nothing when all is well."""
        for child in self._children:
            if child.process.returncode:
                raise child.death()

    async def stop_all(self) -> None:
        """End every child, last started first."""
        while self._children:
            await self._children.pop().stop(GRACE_SECONDS)


@contextlib.asynccontextmanager
async def processes(state: Path) -> AsyncIterator[Processes]:
    """Children with their logs under ``state``, for the time of the context; all end with it.

    A child that fails meanwhile ends the body, whatever it waits for, with that child's :class:`ProcessDied`. Raises
    :class:`ConfigError` when ``state`` cannot be used.
    """
    await asyncio.to_thread(_prepare, state)
    family = Processes(state)
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(family.watch(), name="children")
            yield family
            watcher.cancel()
    except (FarmError, BaseExceptionGroup):
        await asyncio.sleep(NOTICE_SECONDS)  # the kernel may tell of a death later than a broken connection does
        family.raise_death()
        raise
    finally:
        await asyncio.shield(family.stop_all())


def _prepare(state: Path) -> None:
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        (state / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot use the folder {state}: {error.strerror}; choose another") from error
