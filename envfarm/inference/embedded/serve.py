"""Runs one embedded engine as a process until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

import msgspec
import torch
from aiohttp import web

from envfarm.core.errors import ConfigError
from envfarm.inference.embedded.model import CausalModel
from envfarm.inference.embedded.scheduler import Scheduler
from envfarm.inference.embedded.server import build
from envfarm.wire.serving import announce

log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the flags of ``envfarm engine`` say.

    ``kv_bytes`` bounds keys and values; there are as many rows as fit, at most ``max_rows``.
    """

    model: Path
    host: str = "127.0.0.1"
    port: int = 0
    address_file: Path | None = None
    threads: int = 1
    max_rows: int = 128
    context: int = 2048
    dtype: str = "float32"
    weight_version: str = "0"
    seed: int = 0
    max_queued: int = 4096
    kv_bytes: int = 4 << 30


def load(settings: EngineSettings) -> Scheduler:
    """Read the model and lay out its rows. Raises :class:`ConfigError` when the settings do not fit the model."""
    dtype = _DTYPES.get(settings.dtype)
    if dtype is None:
        raise ConfigError(f"unknown dtype {settings.dtype!r}; there is: {', '.join(_DTYPES)}")
    torch.set_num_threads(settings.threads)
    model = CausalModel(settings.model, dtype=dtype)
    context = settings.context
    if model.max_positions is not None and context > model.max_positions:
        log.warning("the model was made for %d positions: context %d is cut to it", model.max_positions, context)
        context = model.max_positions
    row = model.kv_row_bytes(context)
    slots = min(settings.max_rows, settings.kv_bytes // row)
    if slots < 1:
        raise ConfigError(
            f"one row of {context} tokens needs {row >> 20} MiB of keys and values, more than the "
            f"{settings.kv_bytes >> 20} MiB allowed; shorten --context or raise --kv-mib"
        )
    if slots < settings.max_rows:
        log.warning("%d rows instead of %d: more would not fit into --kv-mib", slots, settings.max_rows)
    return Scheduler(model, slots=slots, context=context, version=settings.weight_version)


async def serve(settings: EngineSettings) -> None:
    """Serve until told to end."""
    scheduler = await asyncio.to_thread(load, settings)
    # Both the engine's thread and the loop run Python; at the default of 5 ms each would wait long for the other.
    sys.setswitchinterval(0.0005)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    engine, app = build(scheduler, model_path=str(settings.model), seed=settings.seed, max_queued=settings.max_queued)
    engine.start()
    await engine.call(lambda _: torch.set_num_threads(settings.threads))  # OpenMP keeps this per thread
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.host, settings.port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}") from error
        address = _address(settings.host, runner)
        log.info("engine serves %s at http://%s", settings.model, address)
        await asyncio.to_thread(announce, settings.address_file, address)
        await stop.wait()
    finally:
        await engine.stop()
        await runner.cleanup()


def _address(host: str, runner: web.AppRunner) -> str:
    port = runner.addresses[0][1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
