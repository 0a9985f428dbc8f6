"""Keeping an eye on one host in use: it is asked how it does, now and then or when somebody suspects it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from envfarm.core.errors import DeadlineExceeded, FarmError, SandboxError, Unavailable
from envfarm.core.sandbox import Host
from envfarm.gateway.host_link import HostLink
from envfarm.wire.v1.host_pb2 import InspectResponse

log = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 5.0
WAITING_HEARTBEAT_SECONDS = 0.5  # while somebody waits for a slot: leases end without the gateway being told
CHECKS = 3
CHECK_PAUSE_SECONDS = 0.2
INSPECT_SECONDS = 10.0
UNFIT_SECONDS = 120.0  # that the episodes of a host have to end in, once it says that it should be replaced


async def linked(host: Host, *, ours: bool = True) -> tuple[HostLink, InspectResponse]:
    """A connection to ``host`` and its first report. Raises the farm's errors when it is not there."""
    link = HostLink(host, ours=ours)
    try:
        await link.__aenter__()
        state = await link.inspect(INSPECT_SECONDS)
        if state.host_id != host.id:
            raise SandboxError(f"at {host.address} answers host {state.host_id!r}, not {host.id!r}")
    except BaseException:
        await link.__aexit__(None, None, None)
        raise
    link.report(state)
    for cause in state.quarantined:
        log.warning("host %s has a slot in quarantine: %s", host.id, cause)
    return link, state


async def tend(link: HostLink, *, hurried: Callable[[], bool], reported: Callable[[], None]) -> None:
    """Returns when the host is lost, with ``link.cause``. ``reported`` is called after every report."""
    known = set(link.quarantined)
    unfit_since: float | None = None
    while not link.given_up():
        suspected = await link.next_check(WAITING_HEARTBEAT_SECONDS if hurried() else HEARTBEAT_SECONDS)
        if link.given_up():
            return
        doubt = link.doubt
        state = await _check(link, urgent=suspected)
        if state is None:
            return
        link.report(state)
        if link.doubt is doubt:  # else somebody came to doubt it since, of whom this report says nothing
            link.judge(alive=True)
        for cause in link.quarantined:
            if cause not in known:
                log.warning("host %s: slot in quarantine: %s", link.host.id, cause)
        known = set(link.quarantined)
        unfit_since = (unfit_since or time.monotonic()) if link.unfit else None
        if unfit_since is not None and (not link.busy or time.monotonic() - unfit_since > UNFIT_SECONDS):
            link.cause = f"it is unfit: {link.unfit}"
            return
        reported()


async def _check(link: HostLink, *, urgent: bool) -> InspectResponse | None:
    """The host's report; ``None``, with the cause noted, when it does not answer."""
    for attempt in range(CHECKS):
        try:
            return await link.inspect(INSPECT_SECONDS)
        except (Unavailable, DeadlineExceeded) as error:
            cause = str(error)
        except FarmError as error:
            cause = str(error)
            log.warning("host %s: inspection failed: %s", link.host.id, error)
        if attempt + 1 < CHECKS and not link.cause:
            await asyncio.sleep(CHECK_PAUSE_SECONDS if urgent else CHECK_PAUSE_SECONDS * 5)
    link.cause = link.cause or f"it does not answer: {cause}"
    return None
