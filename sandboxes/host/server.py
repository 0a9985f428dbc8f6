"""A host as a process: serves until it is drained, told to stop, or left alone; then nothing of it remains."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
import msgspec

from envfarm.core.errors import FarmError
from envfarm.wire.channel import serve_options
from envfarm.wire.serving import announce, bind
from envfarm.wire.v1 import host_pb2_grpc
from sandboxes.host.environments import Environments
from sandboxes.host.runner import Runner
from sandboxes.host.service import HostServicer
from sandboxes.host.slots import Slots
from sandboxes.host.sources import Sources
from sandboxes.host.task_pages import TaskPages
from sandboxes.hosting.sockets import remove_socket
from sandboxes.isolation import cgroups, mounts
from sandboxes.isolation.surroundings import MACHINE, Surroundings

log = logging.getLogger(__name__)
SWITCH_SECONDS = 0.0005  # the loop and the code of environments take turns this often
SWEEP_SECONDS = 1.0
TERM_GRACE_SECONDS = 5.0
CONTACT_SECONDS = 15.0  # without a word of any gateway, though each asks every few seconds: clients cannot reach us
RELOAD_SECONDS = 0.5  # between looks at the code of environments
RELOAD_GRACE_SECONDS = 30.0


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the flags of ``envfarm host`` say. ``lease``: seconds without a gateway after which it ends itself.

    ``reload``: it also ends when the code of its environments changes, for whoever made it to start one with the new.
    """

    id: str
    listen: str
    slots: int
    environments: Sequence[str]
    address_file: Path | None
    lease: float
    surroundings: Surroundings = MACHINE
    reload: bool = False


def run(settings: HostSettings) -> int:
    """Serve; returns the exit status."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    ground = mounts.own_ground()  # before the first thread
    cgroups.sweep()
    mounts.sweep()
    sys.setswitchinterval(SWITCH_SECONDS)
    sources = None
    if settings.reload:
        sys.dont_write_bytecode = True  # a change within the same second may look like what was compiled
        sources = Sources(settings.environments)
    try:
        environments = Environments(settings.environments, settings.surroundings)
        gc.freeze()  # what is loaded now stays: no need to look through it again and again
        asyncio.run(_serve(settings, environments, ground, sources))
    except FarmError as error:
        log.error("%s", error)  # noqa: TRY400 - for a person, without a trace
        return 2
    finally:
        mounts.leave_ground(ground)
    return 0


async def _serve(
    settings: HostSettings, environments: Environments, ground: Path, sources: Sources | None = None
) -> None:
    for broken in environments.broken:
        log.warning("environment cannot be served: %s", broken)
    runner = Runner()
    slots = Slots(settings.slots, ground, environments, runner, settings.surroundings)
    servicer = HostServicer(settings.id, environments, slots, TaskPages(runner))
    server = grpc.aio.server(options=serve_options())
    host_pb2_grpc.add_HostServiceServicer_to_server(servicer, server)
    address = bind(server, settings.listen)
    await slots.prepare()
    await server.start()
    await asyncio.to_thread(announce, settings.address_file, address)
    log.info("host %s serves %d slots at %s", settings.id, settings.slots, address)
    try:
        await _until_over(servicer, slots, settings.lease, sources)
        await _finish(slots, servicer)
    finally:
        await server.stop(0.5)
        await runner.close()
        await slots.close()
        if address.startswith("unix:"):
            _remove_socket(address)


def _remove_socket(address: str) -> None:
    remove_socket(Path(address.removeprefix("unix:")))


async def _until_over(servicer: HostServicer, slots: Slots, lease: float, sources: Sources | None) -> None:
    """Returns when drained, terminated, or without a gateway for ``lease`` seconds, or when ``sources`` change.

    Expires episodes meanwhile.
    """
    loop = asyncio.get_running_loop()

    def terminated() -> None:
        servicer.grace = TERM_GRACE_SECONDS
        servicer.hurried = True
        slots.draining = True
        servicer.drained.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, terminated)
    pause = min(SWEEP_SECONDS, lease / 4, RELOAD_SECONDS if sources is not None else SWEEP_SECONDS)
    while not servicer.drained.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await servicer.drained.wait()
        slots.expire(time.monotonic(), reachable=servicer.silence() < CONTACT_SECONDS)
        if servicer.silence() > lease:
            log.warning("no gateway for %g s: this host ends itself", lease)
            return
        if sources is not None and await asyncio.to_thread(sources.changed):
            log.info("the code of environments has changed: this host ends, and the next one has the new code")
            servicer.grace = RELOAD_GRACE_SECONDS
            slots.draining = True
            return


async def _finish(slots: Slots, servicer: HostServicer) -> None:
    """Let what runs end: whole episodes when drained by a gateway, commands when told to stop."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(servicer.grace):
            await slots.quiet(released=not servicer.hurried)
