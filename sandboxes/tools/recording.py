"""HTTP exchanges as data: requests, responses, and recordings that answer the one with the other.

A recording is a mapping, a JSON file of exchanges, or a HAR file as browsers and proxies save it (HAR 1.2,
http://www.softwareishard.com/blog/har-12-spec/). It matches by method and URL, and by body where a recorded request has
one; the order of query parameters, default ports, fragments and the spelling of JSON do not count.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import msgspec

from envfarm.core.errors import ConfigError, ToolError

_PORTS = {"http": 80, "https": 443}
# Of the connection that was recorded: they do not fit a body that has been decoded.
_HOP_HEADERS = {"connection", "content-encoding", "content-length", "keep-alive", "transfer-encoding"}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked. ``url`` is absolute, with its query; header names are in lower case."""

    method: str
    url: str
    headers: dict[str, str] = {}
    body: bytes = b""

    @property
    def path(self) -> str:
        """Path of the URL, decoded, beginning with a slash."""
        return unquote(urlsplit(self.url).path) or "/"

    @property
    def query(self) -> dict[str, str]:
        """Parameters of the URL; of one given several times the last."""
        return dict(parse_qsl(urlsplit(self.url).query, keep_blank_values=True))

    @property
    def json(self) -> Any:
        """The body as JSON; ``None`` when it is none."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """What was answered."""

    status: int = 200
    headers: dict[str, str] = {}
    body: bytes = b""

    @property
    def reason(self) -> str:
        """The usual phrase for the status."""
        try:
            return HTTPStatus(self.status).phrase
        except ValueError:
            return ""


def response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with ``value`` as its body: text, bytes, or anything that JSON can carry; as it is if it is one."""
    if isinstance(value, Response):
        return value
    if isinstance(value, bytes):
        kind, body = "application/octet-stream", value
    elif isinstance(value, str):
        kind, body = "text/plain; charset=utf-8", value.encode("utf-8", "replace")
    else:
        try:
            kind, body = "application/json", msgspec.json.encode(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"a response's body must be text, bytes or JSON: {error}") from error
    lower = {name.lower(): text for name, text in (headers or {}).items()}
    return Response(status=status, headers={"content-type": kind} | lower, body=body)


class Url(msgspec.Struct, frozen=True):
    """What counts of a URL when two are compared."""

    scheme: str
    host: str
    port: int
    path: str
    query: tuple[tuple[str, str], ...]


def parsed(url: str) -> Url:
    """Raises :class:`ToolError` for what is no absolute URL of HTTP."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ToolError(f"error: {url[:200]!r} is not a URL: {error}") from None
    if parts.scheme.lower() not in _PORTS or not host:
        raise ToolError(f"error: {url[:200]!r} is not an absolute URL; it must begin with http:// or https://")
    scheme = parts.scheme.lower()
    path = quote(unquote(parts.path), safe="/:@!$&'()*+,;=~") or "/"
    query = tuple(sorted(parse_qsl(parts.query, keep_blank_values=True)))
    return Url(scheme, host, port or _PORTS[scheme], path, query)


def comparable(body: bytes) -> bytes:
    """A body so that equal JSON has equal bytes."""
    try:
        return msgspec.json.encode(msgspec.json.decode(body), order="deterministic")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return body.strip()


_Key = tuple[str, Url, bytes]


class Recording:
    """Responses by request. Immutable: who replays keeps the count of what was asked already."""

    def __init__(self, exchanges: Sequence[tuple[Request, Response]]) -> None:
        self._responses: dict[_Key, list[Response]] = {}
        for request, answer in exchanges:
            key = (request.method.upper(), _recorded_url(request.url), comparable(request.body))
            self._responses.setdefault(key, []).append(answer)
        self.hosts = frozenset(url.host for _, url, _ in self._responses)

    def find(self, request: Request) -> _Key | None:
        """Which recorded request this is: with its body if one has that, else with none."""
        method, url = request.method.upper(), parsed(request.url)
        for body in dict.fromkeys((comparable(request.body), b"")):
            if (method, url, body) in self._responses:
                return method, url, body
        return None

    def replay(self, key: _Key, times: int) -> Response:
        """The response to a request that was made ``times`` times before; the last one for good."""
        answers = self._responses[key]
        return answers[min(times, len(answers) - 1)]


def _recorded_url(url: str) -> Url:
    try:
        return parsed(url)
    except ToolError as error:
        raise ConfigError(f"recording: {str(error).removeprefix('error: ')}") from None


def recording(source: Recording | Mapping[str, Any] | str | Path) -> Recording:
    """A recording from a mapping (``"GET https://…"`` → response, or list of responses for one call after another),
    or from a file: HAR, or a JSON list of ``{"request": …, "response": …}``. Raises :class:`ConfigError`.
    """  # noqa: D205 - one sentence
    if isinstance(source, Recording):
        return source
    if isinstance(source, Mapping):
        return Recording([exchange for key, value in source.items() for exchange in _exchanges(key, value)])
    path = Path(source)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"recording {path}: {error.strerror}") from error
    try:
        content = msgspec.json.decode(data)
        if isinstance(content, dict) and "log" in content:
            return Recording([_from_har(entry) for entry in msgspec.convert(content, _Har).log.entries])
        return Recording([_from_json(entry) for entry in msgspec.convert(content, list[_Exchange])])
    except (msgspec.DecodeError, binascii.Error) as error:
        raise ConfigError(f"recording {path}: {error}") from error


def _exchanges(key: str, value: Any) -> list[tuple[Request, Response]]:
    method, _, url = key.rpartition(" ")
    request = Request(method=method.strip() or "GET", url=url)
    several = isinstance(value, list | tuple) and any(isinstance(one, Response) for one in value)
    return [(request, response(one)) for one in (value if several else [value])]


class _JsonRequest(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    method: str = "GET"
    body: Any = b""


class _JsonResponse(msgspec.Struct, forbid_unknown_fields=True):
    status: int = 200
    headers: dict[str, str] = {}
    body: Any = ""
    base64: str = ""


class _Exchange(msgspec.Struct, forbid_unknown_fields=True):
    """One entry of the library's own format. A body that is no text is JSON; ``base64`` holds other bytes."""

    request: _JsonRequest
    response: _JsonResponse


def _from_json(entry: _Exchange) -> tuple[Request, Response]:
    asked, answered = entry.request, entry.response
    body = base64.b64decode(answered.base64, validate=True) if answered.base64 else answered.body
    request = Request(method=asked.method, url=asked.url, body=response(asked.body).body)
    return request, response(body, answered.status, answered.headers)


class _HarHeader(msgspec.Struct):
    name: str
    value: str


class _HarPost(msgspec.Struct):
    text: str = ""


class _HarRequest(msgspec.Struct, rename="camel"):
    method: str
    url: str
    post_data: _HarPost | None = None


class _HarContent(msgspec.Struct, rename="camel"):
    text: str = ""
    encoding: str = ""
    mime_type: str = ""


class _HarResponse(msgspec.Struct):
    status: int
    headers: list[_HarHeader] = []
    content: _HarContent = msgspec.field(default_factory=_HarContent)


class _HarEntry(msgspec.Struct):
    request: _HarRequest
    response: _HarResponse


class _HarLog(msgspec.Struct):
    entries: list[_HarEntry]


class _Har(msgspec.Struct):
    log: _HarLog


def _from_har(entry: _HarEntry) -> tuple[Request, Response]:
    asked, answered = entry.request, entry.response
    content = answered.content
    body = base64.b64decode(content.text) if content.encoding == "base64" else content.text.encode()
    headers = {h.name.lower(): h.value for h in answered.headers if h.name.lower() not in _HOP_HEADERS}
    if content.mime_type:
        headers.setdefault("content-type", content.mime_type)
    post = asked.post_data.text.encode() if asked.post_data is not None else b""
    return (
        Request(method=asked.method, url=asked.url, body=post),
        Response(status=answered.status, headers=headers, body=body),
    )
