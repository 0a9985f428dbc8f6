"""One pull of an image, over a connection of its own: a registry may be silent for long, and somebody may give up."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from urllib.parse import urlencode

from docker import APIClient
from docker.auth import get_config_header, resolve_repository_name
from docker.utils import parse_repository_tag

from sandboxes.docker.errors import DockerError, ImageError, Reason, pull_error

CONNECT_SECONDS = 10.0
STALL_SECONDS = 120.0  # without any word of the engine


class Pulling:
    """A pull of ``name`` by the engine that listens at the unix socket ``path``."""

    def __init__(self, name: str, path: str) -> None:
        self._name = name
        self._connection = _Connection(path)
        self._stopped = threading.Event()

    def run(self, client: APIClient) -> None:
        """Pull. Blocking; ends at :meth:`stop`, or when the engine says nothing for :data:`STALL_SECONDS`.

        Raises :class:`ImageError`, or :class:`DockerError` when it was given up.
        """
        repository, tag = parse_repository_tag(self._name)
        query = urlencode({"fromImage": repository, "tag": tag or "latest"})
        try:
            credentials = _credentials(client, repository)
        except Exception as error:  # whatever a credentials store says
            cause = f"its registry's credentials cannot be read: {error}"
            raise ImageError(self._name, Reason.OTHER, cause) from error
        try:
            self._connection.request("POST", f"/v{client.api_version}/images/create?{query}", headers=credentials)
            if self._stopped.is_set():
                self.stop()
            self._read(self._connection.getresponse())
        except (OSError, http.client.HTTPException, ValueError) as error:
            if self._stopped.is_set():
                raise DockerError(f"pulling image {self._name!r} was given up") from error
            cause = f"the engine's answer broke off: {error or type(error).__name__}"
            raise ImageError(self._name, Reason.UNREACHABLE, cause) from error
        finally:
            self._connection.close()

    def stop(self) -> None:
        """Give up: the engine is left, and so gives up itself. From any thread, at any time."""
        self._stopped.set()
        self._connection.break_off()

    def _read(self, answer: http.client.HTTPResponse) -> None:
        if answer.status != 200:
            raise pull_error(self._name, _message(answer.read()))
        while line := answer.readline():
            news = json.loads(line) if line.strip() else {}
            if "error" in news:
                raise pull_error(self._name, str(news["error"]).strip())
        if self._stopped.is_set():
            raise DockerError(f"pulling image {self._name!r} was given up")


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path
        self._made: socket.socket | None = None

    def connect(self) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(CONNECT_SECONDS)
        try:
            made.connect(self._path)
        except OSError:
            made.close()
            raise
        made.settimeout(STALL_SECONDS)
        self.sock = self._made = made

    def break_off(self) -> None:
        if self._made is not None:
            with contextlib.suppress(OSError):  # it is over already
                self._made.shutdown(socket.SHUT_RDWR)


def _credentials(client: APIClient, repository: str) -> dict[str, str]:
    registry, _ = resolve_repository_name(repository)
    found = get_config_header(client, registry)
    if not found:
        return {}
    return {"X-Registry-Auth": found.decode() if isinstance(found, bytes) else str(found)}


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"]).strip()
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500].strip() or "no cause was given"
