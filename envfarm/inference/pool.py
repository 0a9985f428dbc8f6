"""Several engines as one: turns of an episode stay together, dead engines get no work, all serve the same weights."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence

from envfarm.core.deadline import Deadline
from envfarm.core.engine import EngineStatus, GenerateRequest, Generation, PauseMode
from envfarm.core.errors import ConfigError, EngineError
from envfarm.inference.errors import EngineTimeout, EngineUnreachable
from envfarm.inference.sglang_client import SGLangClient

_PROBE_SECONDS = 5.0
_RETRY_SECONDS = 1.0  # between two probes of an engine that failed


class _Member:
    """One engine. It gets work while ``usable``; otherwise it must pass a probe first."""

    def __init__(self, client: SGLangClient) -> None:
        self.client = client
        self.usable = True
        self.probing = asyncio.Lock()
        self.probe_after = Deadline.after(0.0)
        self.owes_resume = False

    def eject(self) -> None:
        self.usable = False
        self.probe_after = Deadline.after(_RETRY_SECONDS)


class EnginePool:
    """Implements :class:`envfarm.core.engine.Engine` over the engines at ``urls``.

    Requests of one ``routing_key`` go to one engine, chosen by rendezvous hashing (Thaler and Ravishankar 1998), so
    that losing an engine moves only its own episodes. An engine that cannot be reached is left out until it answers
    again; one that missed an update of weights gets the latest ones before it gets work.
    """

    def __init__(self, urls: Sequence[str], *, connections: int = 512, api_key: str | None = None) -> None:
        if not urls:
            raise ConfigError("an engine pool needs at least one engine URL, such as http://127.0.0.1:30000")
        if len(set(urls)) != len(urls):
            raise ConfigError(f"an engine URL was given twice: {', '.join(urls)}")
        self._members = [_Member(SGLangClient(u, connections=connections, api_key=api_key)) for u in urls]
        self._latest: tuple[str, int] | None = None  # path and version of the last update made through this pool
        self._updating = asyncio.Lock()
        self._where: dict[str, _Member] = {}

    async def __aenter__(self) -> EnginePool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close connections."""
        for member in self._members:
            await member.client.close()

    async def wait_ready(self, *, timeout: float) -> None:
        """Return once every engine is healthy."""
        async with asyncio.TaskGroup() as group:
            for member in self._members:
                group.create_task(member.client.wait_ready(timeout=timeout))

    async def generate(self, request: GenerateRequest, *, timeout: float) -> Generation:
        """Sample one continuation on the engine of the request's ``routing_key``, or the next one that lives."""
        deadline = Deadline.after(timeout)
        while True:
            member = await self._choose(request.routing_key or request.rid, deadline)
            self._where[request.rid] = member
            try:
                generation = await member.client.generate(request, timeout=deadline.remaining())
            except EngineUnreachable:
                member.eject()
                continue
            finally:
                if self._where.get(request.rid) is member:
                    del self._where[request.rid]
            self._notice_old_weights(member, generation)
            return generation

    async def abort(self, rid: str) -> None:
        """End the request if it still runs anywhere in this pool."""
        member = self._where.get(rid)
        if member is not None:
            await member.client.abort(rid)
            return
        await self._all(lambda member: member.client.abort(rid))

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop sampling everywhere."""
        await self._all(lambda member: member.client.pause(mode))

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        for member in self._members:
            member.owes_resume = True

        async def resume(member: _Member) -> None:
            await member.client.resume()
            member.owes_resume = False

        await self._all(resume)

    async def update_weights_from_disk(self, path: str, *, version: int, timeout: float) -> None:
        """Serve the weights under ``path`` as ``version`` everywhere.

        Returns when every engine has them or is left out until it has. Raises when none took them.
        """
        async with self._updating:
            self._latest = (path, version)
            failures = await asyncio.gather(*(self._update(member, path, version, timeout) for member in self._members))
        if all(failure is not None for failure in failures):
            raise EngineError(f"no engine took weight version {version} from {path}: {failures[0]}")

    async def status(self) -> Sequence[EngineStatus]:
        """State of every engine, in the order of the URLs."""
        return await asyncio.gather(*(member.client.status() for member in self._members))

    # -- choosing -------------------------------------------------------------------------------------------------

    async def _choose(self, key: str, deadline: Deadline) -> _Member:
        ranked = sorted(self._members, key=lambda member: _rank(key, member.client.url), reverse=True)
        while True:
            for member in ranked:
                if member.usable or await self._brought_up(member, deadline):
                    return member
            if deadline.expired():
                urls = ", ".join(member.client.url for member in self._members)
                raise EngineTimeout(f"no engine answers ({urls}); start one, or look at their logs")
            soonest = min(member.probe_after.remaining() for member in self._members)
            await asyncio.sleep(min(max(soonest, 0.01), deadline.remaining()))

    async def _brought_up(self, member: _Member, deadline: Deadline) -> bool:
        """Probe an engine that was left out: it must be healthy and serve the latest weights of this pool."""
        if not member.probe_after.expired():
            return False
        async with member.probing:
            if member.usable:
                return True
            if not member.probe_after.expired():
                return False
            budget = deadline.capped(_PROBE_SECONDS)
            try:
                version = await member.client.version(timeout=budget.remaining())
                if self._latest is not None and version < self._latest[1]:
                    path, latest = self._latest
                    await member.client.update_weights_from_disk(path, version=latest, timeout=deadline.remaining())
                if member.owes_resume:
                    await member.client.resume()
                    member.owes_resume = False
            except EngineError:
                member.eject()
                return False
            member.usable = True
            return True

    async def _update(self, member: _Member, path: str, version: int, timeout: float) -> EngineError | None:
        async with member.probing:
            try:
                await member.client.update_weights_from_disk(path, version=version, timeout=timeout)
            except EngineError as error:
                member.eject()
                return error
            member.usable = True
            return None

    def _notice_old_weights(self, member: _Member, generation: Generation) -> None:
        """An engine that restarted between two requests serves its first weights again: bring it up before more."""
        if self._latest is not None and generation.versions and generation.versions[-1].version < self._latest[1]:
            member.usable = False

    async def _all(self, call: Callable[[_Member], Awaitable[None]]) -> None:
        """Make the same call everywhere; engines that cannot be reached have nothing to be told."""

        async def one(member: _Member) -> None:
            try:
                await call(member)
            except EngineUnreachable:
                member.eject()

        async with asyncio.TaskGroup() as group:
            for member in self._members:
                group.create_task(one(member))


def _rank(key: str, url: str) -> bytes:
    return hashlib.blake2b(f"{key}\x1f{url}".encode(), digest_size=8).digest()
