"""What goes wrong with a Docker Engine, in words for a person: the thing, the cause, the remedy.

::

    SandboxError
    └── DockerError            the engine cannot do what was asked
        ├── DockerUnreachable  nobody answers at its socket, or we may not speak to it
        └── ImageError         an image cannot be had; ``reason`` says why, ``retry_after_s`` when to ask again
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Iterator

from docker.errors import APIError, DockerException
from requests.exceptions import RequestException, Timeout

from envfarm.core.errors import SandboxError

SOCKETS_OF_GVISOR = (
    "gVisor's runtime needs the arguments --network=none and --host-uds=all ('runtimeArgs' in /etc/docker/daemon.json)"
)


class DockerError(SandboxError):
    """The Docker Engine cannot do what was asked."""


class DockerUnreachable(DockerError):
    """The Docker Engine does not answer, or does not let us in."""


class Reason(enum.StrEnum):
    """Why an image cannot be had."""

    NOT_FOUND = "not_found"
    DENIED = "denied"
    LIMITED = "limited"
    NO_SPACE = "no_space"
    UNREACHABLE = "unreachable"
    ABSENT = "absent"
    OTHER = "other"


class ImageError(DockerError):
    """An image cannot be had. ``retry_after_s``: seconds until the registry is asked again."""

    def __init__(self, image: str, reason: Reason, cause: str, *, retry_after_s: float | None = None) -> None:
        again = f" (asked again in {retry_after_s:.0f} s)" if retry_after_s is not None else ""
        super().__init__(f"image {image!r} cannot be had: {cause}; {_remedy(image, reason)}{again}")
        self.image = image
        self.reason = reason
        self.cause = cause
        self.retry_after_s = retry_after_s


def engine_error(what: str, error: Exception, url: str) -> DockerError:
    """``error`` of the SDK, raised while doing ``what``, as the farm's own."""
    if isinstance(error, APIError):
        return DockerError(f"{what}: the Docker Engine says: {said(error)}{_hint(said(error))}")
    if any(isinstance(e, Timeout) for e in _causes(error)):
        return DockerUnreachable(f"{what}: the Docker Engine at {url} does not answer in time; is it overloaded?")
    code = next((e.errno for e in _causes(error) if isinstance(e, OSError) and isinstance(e.errno, int)), None)
    if code in (errno.EACCES, errno.EPERM):
        return DockerUnreachable(
            f"{what}: this user may not use the Docker Engine at {url}; "
            "add it to the group that owns the socket (usually: usermod -aG docker USER), or set DOCKER_HOST"
        )
    if code is not None or isinstance(error, RequestException | DockerException):
        return DockerUnreachable(
            f"{what}: no Docker Engine answers at {url} ({_innermost(error)}); "
            "start it (systemctl start docker) or set DOCKER_HOST"
        )
    return DockerError(f"{what}: {error}")


def pull_error(image: str, text: str) -> ImageError:
    """What the engine said when it could not pull ``image``."""
    low = text.lower()
    for reason, signs in _SIGNS:
        if any(sign in low for sign in signs):
            return ImageError(image, reason, text)
    return ImageError(image, Reason.OTHER, text)


def said(error: APIError) -> str:
    """The engine's own words."""
    return str(error.explanation or error).strip()


_SIGNS = (
    (Reason.LIMITED, ("toomanyrequests", "too many requests", "429")),
    (Reason.NO_SPACE, ("no space left",)),
    (
        Reason.NOT_FOUND,
        ("manifest unknown", "manifest for", "repository does not exist", "name unknown", "404", "invalid reference"),
    ),
    (Reason.DENIED, ("unauthorized", "denied", "authentication", "no basic auth", "401", "403", "forbidden")),
    (
        Reason.UNREACHABLE,
        ("connection refused", "no such host", "timeout", "timed out", "tls handshake", "unreachable", "eof", "dial "),
    ),
)


def _remedy(image: str, reason: Reason) -> str:
    registry = image.partition("/")[0] if "." in image.partition("/")[0] or ":" in image.partition("/")[0] else ""
    login = f"docker login{' ' + registry if registry else ''}"
    return {
        Reason.NOT_FOUND: f"check its name and tag, or, if it is private, log in: {login}",
        Reason.DENIED: f"log in as somebody who may read it: {login}",
        Reason.LIMITED: f"the registry limits how often it is asked: log in ({login}), use a mirror, or load the image",
        Reason.NO_SPACE: "free space under the engine's folder: docker system df, docker image prune",
        Reason.UNREACHABLE: "check the network to its registry, or load the image: docker load",
        Reason.ABSENT: "build it, load it (docker load), or let it be pulled (pull=missing)",
        Reason.OTHER: f"try by hand: docker pull {image}",
    }[reason]


def _hint(text: str) -> str:
    low = text.lower()
    if "unknown runtime" in low or "runtime name" in low:
        return "; install it and name it under 'runtimes' in /etc/docker/daemon.json, or leave the option runtime out"
    if "cannot run with network enabled" in low:
        return f"; {SOCKETS_OF_GVISOR}"
    if "no space left" in low:
        return "; free space under the engine's folder: docker system df, docker image prune"
    if "bind source path does not exist" in low:
        return "; the engine must run on this machine and see the gateway's state folder"
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it was made of: requests and urllib3 keep it in ``args``."""
    seen: list[BaseException] = [error]
    for found in seen:
        yield found
        for other in (*found.args, found.__cause__, found.__context__, getattr(found, "reason", None)):
            if isinstance(other, BaseException) and other not in seen:
                seen.append(other)


def _innermost(error: Exception) -> str:
    named = [e.strerror for e in _causes(error) if isinstance(e, OSError) and e.strerror]
    return named[0] if named else str(error)
