"""HTTP for models, without a network: requests are answered from a recording or by the environment itself.

Nothing here opens a socket. One tool, ``http_request``, with the arguments of Python's ``requests``, shows the answer
as ``curl -i`` does. Everything that could differ between two episodes follows from the episode's seed and what the
model asks.
"""

from __future__ import annotations

import asyncio
import codecs
import inspect
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode

import msgspec

from envfarm.core.environment import Toolset, tool
from envfarm.core.errors import ToolError
from sandboxes.tools.faults import NONE, Fault, Faults
from sandboxes.tools.recording import Recording, Request, Response, Url, parsed, recording, response

Handler = Callable[[Any, Request], Any | Awaitable[Any]]
"""A function of the environment and a request. Returns a :class:`Response`, text, bytes or JSON; ``None``: unknown."""

MAX_REQUEST_BYTES = 1 << 20
_REQUESTS_KEPT = 1000


class Http(Toolset):
    """Requests to endpoints that are recorded or simulated.

    ``recorded``: see :func:`recording.recording`. ``simulated``: beginning of a URL → function of the environment and
    the request; the longest one that fits answers, after what is recorded. ``unknown``: status for a URL that nothing
    answers; by default 404 at a host that is known and a connection error at any other. ``faults``: what goes wrong.
    ``timeout``: in seconds, after which a request is given up; one that :class:`Faults` lets time out is told at once.
    ``max_bytes``: of a body that are shown.

    ``requests`` holds what the model asked in this episode, the latest thousand, for ``verify`` to look at.
    """

    def __init__(
        self,
        recorded: Recording | Mapping[str, Any] | str | Path | None = None,
        simulated: Mapping[str, Handler] | None = None,
        *,
        unknown: int | None = None,
        faults: Faults = NONE,
        timeout: float = 10.0,
        max_bytes: int = 12_000,
    ) -> None:
        self._recording = recording(recorded if recorded is not None else {})
        handlers = [(parsed(prefix), handler) for prefix, handler in (simulated or {}).items()]
        self._handlers = sorted(handlers, key=lambda pair: len(pair[0].path), reverse=True)
        self._hosts = self._recording.hosts | {url.host for url, _ in handlers}
        self._unknown = unknown
        self._faults = faults
        self._timeout = timeout
        self._max_bytes = max_bytes
        self.requests: deque[Request] = deque(maxlen=_REQUESTS_KEPT)
        self._asked: Counter[Any] = Counter()
        self._count = 0

    def reset(self) -> None:
        """Forget what was asked; recordings begin anew."""
        self.requests.clear()
        self._asked.clear()
        self._count = 0

    @tool
    async def http_request(
        self,
        url: str,
        method: Literal["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"] = "GET",
        headers: dict[str, str] | None = None,
        params: dict[str, str | int | float | bool] | None = None,
        json: Any = None,
        body: str = "",
    ) -> str:
        """Make an HTTP request and return status, headers and body of the response.

        Args:
            url: Absolute URL, beginning with http:// or https://.
            method: HTTP method.
            headers: Request headers.
            params: Query parameters to add to the URL.
            json: Value to send as a JSON body.
            body: Text to send as body, when it is not JSON.
        """
        request = _request(url, method, headers, params, json, body)
        where = parsed(request.url)
        index, self._count = self._count, self._count + 1
        self.requests.append(request)
        fault = self._faults.drawn(self.environment.seed, index) if self._faults is not NONE else Fault()
        if fault.seconds:
            await asyncio.sleep(min(fault.seconds, self._timeout))
        if fault.kind == "timeout" or fault.seconds > self._timeout:
            raise ToolError(f"error: {where.host} gave no answer: timed out after {self._timeout:g} s")
        if fault.kind == "refused":
            raise ToolError(f"error: failed to connect to {where.host} port {where.port}: connection refused")
        if fault.kind == "status":
            answer = response("", fault.status)
        else:
            answer = await self._answer(request, where)
        return self._shown(answer, with_body=method != "HEAD")

    async def _answer(self, request: Request, where: Url) -> Response:
        key = self._recording.find(request)
        if key is not None:
            self._asked[key] += 1
            return self._recording.replay(key, self._asked[key] - 1)
        for prefix, handler in self._handlers:
            if _below(where, prefix):
                value = handler(self.environment, request)
                if inspect.isawaitable(value):
                    value = await value
                if value is not None:
                    return response(value)
        if self._unknown is None and where.host not in self._hosts:
            raise ToolError(f"error: could not resolve host: {where.host}")
        return response("", self._unknown or 404)

    def _shown(self, answer: Response, *, with_body: bool) -> str:
        head = [f"HTTP/1.1 {answer.status} {answer.reason}".rstrip()]
        head += [f"{name}: {value}" for name, value in answer.headers.items()]
        text = _text(answer, self._max_bytes) if with_body else ""
        return "\n".join([*head, "", text]) if text else "\n".join(head)


def _request(
    url: str,
    method: str,
    headers: dict[str, str] | None,
    params: Mapping[str, str | int | float | bool] | None,
    json: Any,
    body: str,
) -> Request:
    if json is not None and body:
        raise ToolError("error: give json or body, not both")
    if params:
        words = {name: str(value).lower() if isinstance(value, bool) else value for name, value in params.items()}
        url, hash_sign, fragment = url.partition("#")
        url += ("&" if "?" in url else "?") + urlencode(words) + hash_sign + fragment
    sent = {name.lower(): value for name, value in (headers or {}).items()}
    data = body.encode("utf-8", "replace")
    if json is not None:
        data = msgspec.json.encode(json)
        sent.setdefault("content-type", "application/json")
    if len(data) + len(url) > MAX_REQUEST_BYTES:
        raise ToolError(f"error: the request is larger than {MAX_REQUEST_BYTES} bytes")
    return Request(method=method, url=url, headers=sent, body=data)


def _below(url: Url, prefix: Url) -> bool:
    if (url.scheme, url.host, url.port) != (prefix.scheme, prefix.host, prefix.port):
        return False
    return url.path == prefix.path or url.path.startswith(prefix.path.rstrip("/") + "/")


def _text(answer: Response, limit: int) -> str:
    """The body for a model: text as it is, cut with a notice; what is no text only by its kind and size."""
    kind = answer.headers.get("content-type", "")
    charset = kind.partition("charset=")[2].partition(";")[0].strip(" \"'") or "utf-8"
    part = answer.body[:limit]
    try:
        b"?".decode(charset)  # refuses codecs that make no text
        text = codecs.getincrementaldecoder(charset)().decode(part, final=len(part) == len(answer.body))
    except (UnicodeError, LookupError):
        text = "\0"
    if "\0" in text:
        return f"[binary body: {kind.partition(';')[0] or 'unknown type'}, {len(answer.body)} bytes]"
    left = len(answer.body) - len(part)
    return f"{text}\n[... {left} of {len(answer.body)} bytes cut ...]" if left else text
