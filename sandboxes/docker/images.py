"""Images by name: pulled when the policy says so, and registries that refuse are not asked again and again."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from docker import APIClient
from docker.errors import APIError, ImageNotFound, NotFound

from sandboxes.docker.engine import Engine, socket_path
from sandboxes.docker.errors import ImageError, Reason, said
from sandboxes.docker.pulling import Pulling

PULL_SECONDS = 1800.0
_FIRST_WAIT = {Reason.LIMITED: 60.0}
_FIRST_WAIT_ELSE = 5.0
_MOST_WAIT = 900.0


class Pull(enum.StrEnum):
    """When to ask the registry for an image."""

    MISSING = "missing"
    NEVER = "never"
    ALWAYS = "always"


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """An image that the engine has: its id (a digest), variables, working folder and size in bytes."""

    name: str
    id: str
    env: tuple[str, ...]
    workdir: str
    size: int


class _Refusal(msgspec.Struct, kw_only=True):
    """How often a pull has failed, why, and when (of the monotonic clock) it may be tried again."""

    failures: int
    error: ImageError
    again: float


class Images:
    """What the engine has and can get. Concurrent callers of one image share one pull."""

    def __init__(self, engine: Engine, pull: Pull) -> None:
        self._engine = engine
        self._pull = pull
        self._refusals: dict[str, _Refusal] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def get(self, name: str) -> Image:
        """The image called ``name``. Raises :class:`ImageError` with the cause and, maybe, when to ask again."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            if self._pull is not Pull.ALWAYS:
                found = await self._engine.call(f"looking for image {name!r}", lambda client: _inspect(client, name))
                if found is not None:
                    return found
                if self._pull is Pull.NEVER:
                    raise ImageError(name, Reason.ABSENT, "the engine does not have it, and it must not be pulled")
            await self._get(name)
            found = await self._engine.call(f"looking for image {name!r}", lambda client: _inspect(client, name))
            if found is None:
                raise ImageError(name, Reason.OTHER, "the engine pulled it and does not have it")
            return found

    async def _get(self, name: str) -> None:
        refusal = self._refusals.get(name)
        if refusal is not None and (left := refusal.again - time.monotonic()) > 0:
            raise ImageError(name, refusal.error.reason, refusal.error.cause, retry_after_s=left)
        pulling = Pulling(name, socket_path(self._engine.url))
        try:
            await self._engine.call(f"pulling image {name!r}", pulling.run, PULL_SECONDS, give_up=pulling.stop)
        except ImageError as error:
            raise self._refused(name, error) from None
        self._refusals.pop(name, None)

    def _refused(self, name: str, error: ImageError) -> ImageError:
        before = self._refusals.get(name)
        failures = before.failures + 1 if before is not None else 1
        wait = min(_MOST_WAIT, _FIRST_WAIT.get(error.reason, _FIRST_WAIT_ELSE) * 2.0 ** min(failures - 1, 16))
        self._refusals[name] = _Refusal(failures=failures, error=error, again=time.monotonic() + wait)
        return ImageError(name, error.reason, error.cause, retry_after_s=wait)


def _inspect(client: APIClient, name: str) -> Image | None:
    try:
        found: Mapping[str, Any] = client.inspect_image(name)
    except (ImageNotFound, NotFound):
        return None
    except APIError as error:
        if error.status_code == 400:
            raise ImageError(name, Reason.NOT_FOUND, said(error)) from error
        raise
    settings = found.get("Config") or {}
    return Image(
        name=name,
        id=str(found["Id"]),
        env=tuple(settings.get("Env") or ()),
        workdir=str(settings.get("WorkingDir") or ""),
        size=int(found.get("Size") or 0),
    )
