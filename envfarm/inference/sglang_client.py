"""Client of one inference server that speaks SGLang's HTTP API: SGLang itself, or the embedded engine."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import aiohttp
import msgspec

from envfarm.core.deadline import Deadline
from envfarm.core.engine import EngineStatus, GenerateRequest, Generation, PauseMode
from envfarm.core.errors import EngineError
from envfarm.inference.errors import EngineBusy, EngineRefused, EngineTimeout, EngineUnreachable
from envfarm.inference.sglang_bodies import (
    Lengths,
    Loads,
    ModelInfo,
    Reply,
    Updated,
    sampling_params,
    to_generation,
    to_version,
)

T = TypeVar("T")
_STATUS_SECONDS = 5.0
_CONTROL_SECONDS = 30.0
_BACKOFF = (0.02, 0.5)  # seconds: first pause between tries, longest pause
_UNAVAILABLE = 503
_GONE = frozenset({502, 504})  # the engine behind the address ended, or a router lost it
_encode = msgspec.json.Encoder().encode


class _Answer(NamedTuple):
    status: int
    body: bytes


_reply = msgspec.json.Decoder(Reply)


class SGLangClient:
    """One server at ``url`` (``http://`` may be left out). At most ``connections`` requests are in flight at once.

    An async context manager; every call has a deadline. Only calls that are safe to repeat are repeated: a refused
    connection never reached the server, and ``/generate`` may be sent again under its ``rid``.
    """

    def __init__(self, url: str, *, connections: int = 512, api_key: str | None = None) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._connections = connections
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> SGLangClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- sampling -------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest, *, timeout: float) -> Generation:
        """Sample one continuation; an abort is a :class:`Generation` with ``finish='abort'``.

        Raises :class:`EngineTimeout` after ``timeout`` seconds (the server drops the request),
        :class:`EngineUnreachable`, :class:`EngineBusy` or :class:`EngineRefused`.
        """
        body = {
            "rid": request.rid,
            "input_ids": request.input_ids,
            "sampling_params": sampling_params(request.sampling),
            "return_logprob": True,
            "logprob_start_len": -1,
            "routing_key": request.routing_key,
            "stream": False,
        }
        payload = _encode(body)
        answer = await self._resend("POST", "/generate", payload, Deadline.after(timeout))
        return to_generation(self._decoded(_reply, answer), url=self.url)

    async def abort(self, rid: str) -> None:
        """End the request if it still runs."""
        await self._control("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        """End everything that runs or waits."""
        await self._control("/abort_request", {"rid": "", "abort_all": True})

    # -- control --------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop sampling at the next token: end the requests, or keep them without or with their caches."""
        await self._control("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        await self._control("/continue_generation", {})

    async def flush_cache(self) -> bool:
        """Drop the prefix cache; False when requests run, and nothing was dropped."""
        answer = await self._send("POST", "/flush_cache", b"{}", Deadline.after(_CONTROL_SECONDS))
        if answer.status == 400:
            return False
        self._expect_ok("/flush_cache", answer)
        return True

    async def update_weights_from_disk(
        self,
        path: str,
        *,
        version: int,
        timeout: float,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
    ) -> None:
        """Serve the weights under ``path`` as ``version`` from the next token on.

        ``path`` must be readable by the server. Raises :class:`EngineRefused` when it kept the old weights.
        """
        body = {
            "model_path": path,
            "weight_version": str(version),
            "flush_cache": flush_cache,
            "abort_all_requests": abort_all_requests,
        }
        deadline = Deadline.after(timeout)
        answer = await self._send("POST", "/update_weights_from_disk", _encode(body), deadline)
        self._expect_ok("/update_weights_from_disk", answer)
        updated = self._decoded(msgspec.json.Decoder(Updated), answer)
        if not updated.success:
            raise EngineRefused(f"{self.url} did not take version {version} from {path}: {updated.message}")

    # -- state ----------------------------------------------------------------------------------------------------

    async def version(self, *, timeout: float = _STATUS_SECONDS) -> int:
        """Version of the weights that are served now."""
        return (await self._model_info(Deadline.after(timeout)))[1]

    async def healthy(self, *, timeout: float = _STATUS_SECONDS) -> bool:
        """Whether ``/health`` answers 200 in time."""
        try:
            answer = await self._send("GET", "/health", None, Deadline.after(timeout))
        except EngineError:
            return False
        return answer.status == 200

    async def status(self, *, timeout: float = _STATUS_SECONDS) -> EngineStatus:
        """Live state; an engine that does not answer is ``healthy=False`` with version -1."""
        deadline = Deadline.after(timeout)
        try:
            path, version = await self._model_info(deadline)
            loads = await self._get("/v1/loads", Loads, deadline)
            lengths = await self._get("/server_info", Lengths, deadline)
            tokens = await self._tokens_generated(deadline)
        except EngineError:
            return EngineStatus(url=self.url, model_path="", version=-1, healthy=False)
        return EngineStatus(
            url=self.url,
            model_path=path,
            version=version,
            running=sum(load.num_running_reqs for load in loads.loads),
            waiting=sum(load.num_waiting_reqs for load in loads.loads),
            tokens_generated=tokens,
            context_tokens=lengths.context_length or lengths.max_req_input_len,
        )

    async def server_info(self, *, timeout: float = _STATUS_SECONDS) -> dict[str, Any]:
        """The server's settings, as it tells them."""
        return await self._get("/server_info", dict[str, Any], Deadline.after(timeout))

    async def wait_ready(self, *, timeout: float) -> None:
        """Return once ``/health`` answers 200; raises :class:`EngineTimeout` when it never does."""
        deadline = Deadline.after(timeout)
        while not await self.healthy(timeout=min(_STATUS_SECONDS, max(0.05, deadline.remaining()))):
            if deadline.expired():
                raise EngineTimeout(f"{self.url} was not ready within {timeout:g} s; look at the engine's log")
            await asyncio.sleep(min(0.1, deadline.remaining()))

    async def _model_info(self, deadline: Deadline) -> tuple[str, int]:
        info = await self._get("/model_info", ModelInfo, deadline)
        return info.model_path, to_version(info.weight_version, url=self.url)

    async def _tokens_generated(self, deadline: Deadline) -> int:
        answer = await self._send("GET", "/metrics", None, deadline)
        if answer.status != 200:  # SGLang serves metrics only with --enable-metrics
            return 0
        total = 0.0
        for line in answer.body.decode(errors="replace").splitlines():
            if line.startswith("sglang:generation_tokens_total"):
                total += float(line.rsplit(" ", 1)[1])
        return int(total)

    # -- HTTP -----------------------------------------------------------------------------------------------------

    async def _control(self, path: str, body: dict[str, Any]) -> None:
        answer = await self._send("POST", path, _encode(body), Deadline.after(_CONTROL_SECONDS))
        self._expect_ok(path, answer)

    async def _get(self, path: str, kind: type[T], deadline: Deadline) -> T:
        answer = await self._send("GET", path, None, deadline)
        self._expect_ok(path, answer)
        return self._decoded(msgspec.json.Decoder(kind), answer)

    async def _resend(self, method: str, path: str, payload: bytes, deadline: Deadline) -> _Answer:
        """Repeat a call that is safe to repeat until the deadline, while the server is busy or the connection broke."""
        pause, longest = _BACKOFF
        broken = 0
        while True:
            try:
                answer = await self._send(method, path, payload, deadline)
                if not _passing(answer):
                    self._expect_ok(path, answer)
                    return answer
                failure: EngineError = EngineBusy(f"{self.url}: {_message(answer)}")
            except EngineUnreachable as error:
                broken += 1
                if broken > 1:  # once may be a connection that idled out; twice is the server
                    raise
                failure = error
            if deadline.remaining() <= pause:
                raise failure
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _send(self, method: str, path: str, payload: bytes | None, deadline: Deadline) -> _Answer:
        if deadline.expired():
            raise EngineTimeout(f"{self.url}{path}: the time budget was used up before the request was sent")
        session = self._opened()
        try:
            async with asyncio.timeout(deadline.remaining()):
                async with session.request(method, self.url + path, data=payload) as response:
                    return _Answer(response.status, await response.read())
        except TimeoutError as error:
            raise EngineTimeout(
                f"{self.url}{path} did not answer in time; raise the time limit, or give the engine less at once"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachable(
                f"{self.url}{path} cannot be reached ({type(error).__name__}: {error}); is the engine running?"
            ) from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=30.0),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=True,
            )
        return self._session

    def _expect_ok(self, path: str, answer: _Answer) -> None:
        if answer.status == 200:
            return
        if answer.status in _GONE:
            raise EngineUnreachable(f"{self.url}{path}: {_message(answer)}")
        if answer.status == _UNAVAILABLE:
            raise EngineBusy(f"{self.url}{path}: {_message(answer)}")
        raise EngineRefused(f"{self.url}{path} answered {answer.status}: {_message(answer)}")

    def _decoded(self, decoder: msgspec.json.Decoder[T], answer: _Answer) -> T:
        try:
            return decoder.decode(answer.body)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.url} sent an answer that is not SGLang's: {error}") from error


def _passing(answer: _Answer) -> bool:
    """Whether the same request may go through later: a full queue, or a lost try of it that still winds down."""
    return answer.status == _UNAVAILABLE or (answer.status == 400 and b"duplicate request" in answer.body.lower())


def _message(answer: _Answer) -> str:
    text = answer.body.decode(errors="replace").strip()
    try:
        body = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return text[:500] or "no message"
    if isinstance(body, dict):
        error = body.get("error", body)
        if isinstance(error, dict) and "message" in error:
            return str(error["message"])
    return text[:500]
