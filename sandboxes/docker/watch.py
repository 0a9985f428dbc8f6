"""One host's container while it lives: its last lines, its end and the cause of that, known at once.

A thread follows the container's log; the log's end is the container's. The engine's events tell how it ended, since a
container that removes itself can no longer be asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque

import msgspec
from docker import APIClient
from docker.errors import DockerException, NotFound
from docker.types import CancellableStream
from requests.exceptions import RequestException

from sandboxes.docker.engine import Engine
from sandboxes.docker.errors import engine_error
from sandboxes.docker.labels import OWNER
from sandboxes.docker.sweeping import discard

log = logging.getLogger(__name__)
TERM_SECONDS = 8
_LINES = 50
_REMEMBERED = 256
_EVENT_SECONDS = 1.0
_FIRST_PAUSE, _MOST_PAUSE = 0.05, 2.0
# The last two: what http.client makes of a stream that another thread closes.
_TROUBLE = (DockerException, RequestException, OSError, ValueError, AttributeError)


class Death(msgspec.Struct, kw_only=True):
    """What the engine told of a container's end."""

    exit_code: int | None = None
    out_of_memory: bool = False

    def __str__(self) -> str:
        if self.exit_code is None:
            return "its container ended"
        if self.out_of_memory and self.exit_code == 137:
            return "the kernel killed it: its container was out of memory"
        if self.exit_code == 137:
            return "it was killed by SIGKILL (status 137)"
        return f"it ended with status {self.exit_code}"


class Deaths:
    """The engine's events about one owner's containers, in a thread of its own, which also tells that it is away."""

    def __init__(self, engine: Engine, owner: str) -> None:
        self._engine = engine
        self._owner = owner
        self._found: OrderedDict[str, Death] = OrderedDict()
        self._news = threading.Condition()
        self._closed = threading.Event()
        self._away = False
        self._stream: CancellableStream | None = None
        self._thread = threading.Thread(target=self._follow, name="docker events", daemon=True)
        self._thread.start()

    def of(self, container: str, seconds: float = _EVENT_SECONDS) -> Death:
        """How ``container`` ended; waits a moment for the engine to say so. Blocking."""
        with self._news:
            self._news.wait_for(lambda: self._known(container) or self._closed.is_set(), seconds)
            return self._found.get(container, Death())

    def close(self) -> None:
        """Stop following."""
        self._closed.set()
        _break_off(self._stream)

    def _known(self, container: str) -> bool:
        return container in self._found and self._found[container].exit_code is not None

    def _follow(self) -> None:
        since, pause = int(time.time()), _FIRST_PAUSE
        filters = {"type": "container", "event": ["die", "oom"], "label": f"{OWNER}={self._owner}"}
        while not self._closed.is_set():
            try:
                with contextlib.closing(self._engine.connect()) as client:
                    self._stream = client.events(since=since, filters=filters, decode=True)
                    if self._closed.is_set():
                        _break_off(self._stream)
                    self._is_there()
                    with contextlib.suppress(*_TROUBLE):  # it breaks off; the next try tells why
                        for event in self._stream:
                            since, pause = int(event.get("time") or since), _FIRST_PAUSE
                            self._note(event)
            except _TROUBLE as error:
                self._is_away(error)
            self._closed.wait(pause)
            pause = min(_MOST_PAUSE, 2 * pause)

    def _is_away(self, error: Exception) -> None:
        if not self._away and not self._closed.is_set():
            self._away = True
            cause = engine_error("watching hosts", error, self._engine.url)
            log.warning("%s; hosts that run go on, none can be made or ended until then", cause)

    def _is_there(self) -> None:
        if self._away:
            self._away = False
            self._engine.forget_facts()
            log.info("the Docker Engine at %s is back", self._engine.url)

    def _note(self, event: dict[str, object]) -> None:
        actor = event.get("Actor")
        if not isinstance(actor, dict):
            return
        with self._news:
            death = self._found.setdefault(str(actor.get("ID")), Death())
            if event.get("Action") == "oom":
                death.out_of_memory = True
            else:
                code = str((actor.get("Attributes") or {}).get("exitCode", ""))
                death.exit_code = int(code) if code.isdigit() else None
            while len(self._found) > _REMEMBERED:
                self._found.popitem(last=False)
            self._news.notify_all()


class HostContainer:
    """A started container. ``ended`` is set on the loop of whoever made this, once it has ended."""

    def __init__(self, engine: Engine, deaths: Deaths, container: str) -> None:
        self.container = container
        self.ended = asyncio.Event()
        self.death = Death()
        self._engine = engine
        self._deaths = deaths
        self._loop = asyncio.get_running_loop()
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._forgotten = threading.Event()
        self._stream: CancellableStream | None = None
        threading.Thread(target=self._follow, name=f"docker log {container[:12]}", daemon=True).start()

    def last_lines(self, count: int = 8) -> str:
        """End of its log, for an error message."""
        return "\n  ".join([*self._lines][-count:]) or "(it wrote nothing)"

    async def end(self) -> None:
        """SIGTERM, then SIGKILL; the container is gone afterwards. Raises the farm's errors when it stays."""
        what = f"ending container {self.container[:12]}"
        await self._engine.call(what, lambda client: _stop(client, self.container), TERM_SECONDS + 20.0)
        self.ended.set()
        self.forget()

    def forget(self) -> None:
        """Stop watching; the container goes on."""
        self._forgotten.set()
        _break_off(self._stream)

    def _follow(self) -> None:
        since, pause, seen = 0, _FIRST_PAUSE, Death()
        while not self._forgotten.is_set():
            try:
                with contextlib.closing(self._engine.connect()) as client:
                    self._stream = client.logs(self.container, stream=True, follow=True, since=since or None)
                    if self._forgotten.is_set():
                        _break_off(self._stream)
                    self._read(self._stream)
                    since = int(time.time())
                    if not self._forgotten.is_set() and (end := _end_of(client, self.container)) is not None:
                        seen = end
                        break
            except NotFound:
                break
            except _TROUBLE as error:  # the engine is away: its containers may live on
                log.debug("container %s: its log cannot be followed: %s", self.container[:12], error)
            self._forgotten.wait(pause)
            pause = min(_MOST_PAUSE, 2 * pause)
        if not self._forgotten.is_set():
            told = self._deaths.of(self.container)
            self.death = seen if told.exit_code is None else told
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self.ended.set)

    def _read(self, stream: CancellableStream) -> None:
        rest = b""
        for part in stream:
            *lines, rest = (rest + part).split(b"\n")
            self._lines.extend(line.decode(errors="replace")[:500] for line in lines)
            rest = rest[-(1 << 16) :]
        if rest:
            self._lines.append(rest.decode(errors="replace")[:500])


def _end_of(client: APIClient, container: str) -> Death | None:
    """How it ended, as far as the engine knows; ``None`` while it lives."""
    try:
        state = client.inspect_container(container)["State"]
    except NotFound:
        return Death()
    if state["Running"]:
        return None
    return Death(exit_code=state.get("ExitCode"), out_of_memory=bool(state.get("OOMKilled")))


def _stop(client: APIClient, container: str) -> None:
    with contextlib.suppress(NotFound):
        client.stop(container, timeout=TERM_SECONDS)
    discard(client, container)


def _break_off(stream: CancellableStream | None) -> None:
    if stream is not None:
        with contextlib.suppress(OSError, AttributeError):  # it has ended in this moment
            stream.close()
