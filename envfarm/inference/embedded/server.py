"""SGLang's HTTP routes over the embedded engine."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from envfarm.core.errors import ConfigError, EngineError
from envfarm.core.ids import derived_seed
from envfarm.inference.embedded import metrics, protocol
from envfarm.inference.embedded.scheduler import Scheduler
from envfarm.inference.embedded.thread import DuplicateRequest, EngineStopped, EngineThread, QueueFull

T = TypeVar("T", bound=msgspec.Struct)
_MAX_BODY = 64 << 20
_encode = msgspec.json.Encoder().encode


class EngineServer:
    """Routes of one engine. ``seed`` makes the sampling seeds of requests that bring none."""

    def __init__(self, engine: EngineThread, *, model_path: str, seed: int) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._model_path = model_path
        self._seed = seed
        self._serial = itertools.count()
        self._updating = asyncio.Lock()
        self._started_at = time.time()
        self._end_ids = self._scheduler.model.end_ids

    def application(self) -> web.Application:
        """The aiohttp application; run it with ``handler_cancellation=True`` so that lost clients free their rows."""
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[_errors])
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        app.router.add_route("*", "/flush_cache", self._flush)
        app.router.add_post("/update_weights_from_disk", self._update_weights)
        for path in ("/health", "/health_generate", "/ready"):
            app.router.add_get(path, self._health)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self._model_info)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self._server_info)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/metrics", self._metrics)
        return app

    # -- sampling -------------------------------------------------------------------------------------------------

    async def _generate(self, http: web.Request) -> web.Response:
        body = await _body(http, protocol.GenerateBody)
        serial = next(self._serial)
        rid = body.rid or f"{os.getpid()}-{serial}"
        request = protocol.to_request(
            body,
            rid=rid,
            vocab_size=self._scheduler.model.vocab_size,
            context=self._scheduler.context,
            end_ids=self._end_ids,
            seed=derived_seed(self._seed, serial),
        )
        done = await self._engine.generate(request)
        return _json(protocol.to_reply(done, return_logprob=body.return_logprob))

    async def _abort(self, http: web.Request) -> web.Response:
        body = await _body(http, protocol.AbortBody)
        if not (body.rid or body.abort_all):
            raise ConfigError("abort_request needs rid or abort_all")
        await self._engine.end(
            lambda scheduler: scheduler.abort(lambda r: body.abort_all or r.rid == body.rid, "Abort request")
        )
        return web.Response()

    # -- control --------------------------------------------------------------------------------------------------

    async def _pause(self, http: web.Request) -> web.Response:
        body = await _body(http, protocol.PauseBody)
        await self._engine.end(lambda scheduler: scheduler.pause(body.mode))
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _: web.Request) -> web.Response:
        await self._engine.call(lambda scheduler: scheduler.resume())
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, _: web.Request) -> web.Response:
        if await self._engine.call(lambda scheduler: scheduler.flush()):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Cache not flushed: requests run or wait.\n", status=400)

    async def _update_weights(self, http: web.Request) -> web.Response:
        body = await _body(http, protocol.UpdateWeightsBody)
        async with self._updating:  # updates take effect in the order in which they came
            try:
                weights = await asyncio.to_thread(self._scheduler.model.read_weights, Path(body.model_path))
            except EngineError as error:
                return _json({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)
            if body.abort_all_requests:
                await self._engine.end(lambda s: s.abort(lambda _: True, "aborted by a weight update"))
            version = self._scheduler.version if body.weight_version is None else body.weight_version
            await self._engine.call(lambda s: s.swap(weights, version))
            self._model_path = body.model_path
        return _json({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    # -- what there is --------------------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.healthy else 503)

    async def _model_info(self, _: web.Request) -> web.Response:
        return _json(
            {
                "model_path": self._model_path,
                "tokenizer_path": self._model_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self._scheduler.version,
                "model_type": self._scheduler.model.config.model_type,
            }
        )

    async def _server_info(self, _: web.Request) -> web.Response:
        scheduler = self._scheduler
        return _json(
            {
                "engine": "envfarm",
                "model_path": self._model_path,
                "context_length": scheduler.context,
                "max_running_requests": scheduler.rows.slots,
                "max_total_num_tokens": scheduler.rows.slots * scheduler.context,
                "weight_version": scheduler.version,
                "dtype": str(scheduler.rows.kv.keys.dtype).removeprefix("torch."),
                "uptime_s": time.time() - self._started_at,
                "internal_states": [msgspec.to_builtins(scheduler.counters)],
            }
        )

    async def _loads(self, _: web.Request) -> web.Response:
        rows = self._scheduler.rows
        running, waiting, held, room = rows.active, self._waiting(), rows.tokens_held, rows.slots * rows.context
        load = {
            "dp_rank": 0,
            "timestamp": time.time(),
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "num_used_tokens": held,
            "num_total_tokens": held,
            "max_total_num_tokens": room,
            "max_running_requests": rows.slots,
            "token_usage": held / room,
        }
        return _json({"timestamp": time.time(), "version": "envfarm", "dp_rank_count": 1, "loads": [load]})

    async def _metrics(self, _: web.Request) -> web.Response:
        text = metrics.render(self._scheduler, waiting=self._waiting(), model_name=self._model_path)
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    def _waiting(self) -> int:
        return max(0, self._engine.live - self._scheduler.rows.active)


async def _body(http: web.Request, kind: type[T]) -> T:
    raw = await http.read()
    return msgspec.json.decode(raw or b"{}", type=kind)


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=_encode(value), status=status, content_type="application/json")


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except (msgspec.DecodeError, ConfigError, DuplicateRequest) as error:
        return _failed(400, "BadRequest", error)
    except QueueFull as error:
        return _failed(503, "ServiceUnavailable", error)
    except EngineStopped as error:
        return _failed(502, "BadGateway", error)
    except EngineError as error:
        return _failed(500, "InternalServerError", error)


def _failed(status: int, kind: str, error: Exception) -> web.Response:
    return _json({"error": {"message": str(error), "type": kind, "code": status}}, status=status)


def build(scheduler: Scheduler, *, model_path: str, seed: int, max_queued: int) -> tuple[EngineThread, web.Application]:
    """The engine's thread, not yet started, and the application in front of it."""
    thread = EngineThread(scheduler, max_queued=max_queued)
    return thread, EngineServer(thread, model_path=model_path, seed=seed).application()
