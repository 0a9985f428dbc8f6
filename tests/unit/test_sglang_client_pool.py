"""The pool of engines: affinity, ejection, and that no engine works with weights it should not have."""

from __future__ import annotations

from collections import Counter

import pytest
import pytest_asyncio
from aiohttp import web

from envfarm.core.engine import GenerateRequest, SamplingParams
from envfarm.core.errors import ConfigError, EngineError
from envfarm.inference.errors import EngineTimeout
from envfarm.inference.pool import EnginePool


class Engine:
    """A scripted engine that can be stopped and started again on its port, with its first weights."""

    def __init__(self):
        self.port = 0
        self.runner = None
        self.version = 0
        self.served = []
        self.refuses_updates = False
        self.aborted = []

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    async def start(self):
        self.version = 0
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/update_weights_from_disk", self.update)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_get("/health", self.health)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self.runner.addresses[0][1]

    async def stop(self):
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def health(self, _):
        return web.Response()

    async def generate(self, http):
        body = await http.json()
        self.served.append((body["routing_key"], self.version))
        meta = {
            "finish_reason": {"type": "length"},
            "weight_version": str(self.version),
            "output_token_logprobs": [[-1.0, 3, None]],
        }
        return web.json_response({"output_ids": [3], "meta_info": meta})

    async def update(self, http):
        if self.refuses_updates:
            return web.json_response({"success": False, "message": "disk on fire"}, status=400)
        self.version = int((await http.json())["weight_version"])
        return web.json_response({"success": True, "message": ""})

    async def abort(self, http):
        self.aborted.append((await http.json())["rid"])
        return web.Response()

    async def model_info(self, _):
        return web.json_response({"model_path": "m", "weight_version": str(self.version)})


@pytest_asyncio.fixture
async def engines():
    made = [Engine() for _ in range(3)]
    for engine in made:
        await engine.start()
    try:
        yield made
    finally:
        for engine in made:
            await engine.stop()


@pytest_asyncio.fixture
async def pool(engines):
    async with EnginePool([engine.address for engine in engines]) as made:
        yield made


async def sample(pool, key, rid="r", timeout=10):
    request = GenerateRequest(rid=rid, input_ids=[1], sampling=SamplingParams(), routing_key=key)
    return await pool.generate(request, timeout=timeout)


def where(engines, key):
    return [i for i, engine in enumerate(engines) for served, _ in engine.served if served == key]


async def test_turns_of_an_episode_go_to_one_engine_and_episodes_spread(engines, pool):
    for turn in range(2):
        for episode in range(30):
            await sample(pool, f"e{episode}", rid=f"{episode}-{turn}")
    homes = [where(engines, f"e{i}") for i in range(30)]
    assert all(len(set(home)) == 1 and len(home) == 2 for home in homes)
    assert len(Counter(home[0] for home in homes)) == 3


async def test_a_dead_engine_moves_only_its_own_episodes(engines, pool):
    for episode in range(20):
        await sample(pool, f"e{episode}")
    before = [where(engines, f"e{i}")[0] for i in range(20)]
    await engines[0].stop()
    for episode in range(20):
        await sample(pool, f"e{episode}", rid="again")
    after = [where(engines, f"e{i}")[-1] for i in range(20)]
    assert all(a == b for a, b in zip(after, before, strict=True) if b != 0)
    assert all(a != 0 for a, b in zip(after, before, strict=True) if b == 0)


async def test_an_engine_that_missed_an_update_gets_it_before_any_work(engines, pool):
    await engines[0].stop()
    await pool.update_weights_from_disk("/weights/5", version=5, timeout=5)
    await engines[0].start()
    engines[0].served.clear()
    member = pool._members[0]
    member.probe_after = member.probe_after.capped(0.0)
    for episode in range(30):
        generation = await sample(pool, f"e{episode}")
        assert generation.versions[-1].version == 5
    assert engines[0].version == 5
    assert engines[0].served


async def test_an_engine_that_refused_an_update_gets_no_work(engines, pool):
    engines[1].refuses_updates = True
    await pool.update_weights_from_disk("/weights/5", version=5, timeout=5)
    for episode in range(30):
        await sample(pool, f"e{episode}")
    assert engines[1].served == []


async def test_an_engine_that_restarted_unnoticed_is_brought_up_after_one_answer(engines, pool):
    await pool.update_weights_from_disk("/weights/5", version=5, timeout=5)
    engines[2].version = 0
    versions = [(await sample(pool, f"e{episode}")).versions[-1].version for episode in range(30)]
    assert versions.count(0) <= 1
    assert engines[2].version == 5


async def test_an_update_that_no_engine_takes_is_an_error(engines, pool):
    for engine in engines:
        engine.refuses_updates = True
    with pytest.raises(EngineError, match="disk on fire"):
        await pool.update_weights_from_disk("/weights/5", version=5, timeout=5)


async def test_when_no_engine_answers_the_deadline_says_which_were_asked(engines, pool):
    for engine in engines:
        await engine.stop()
    with pytest.raises(EngineTimeout, match=engines[0].address):
        await sample(pool, "e", timeout=0.5)


async def test_a_pool_waits_for_an_engine_that_comes_back(engines):
    async with EnginePool([engines[0].address]) as pool:
        await engines[0].stop()
        with pytest.raises(EngineTimeout):
            await sample(pool, "e", timeout=0.2)
        await engines[0].start()
        assert (await sample(pool, "e", timeout=10)).output_ids == [3]


async def test_status_shows_the_dead_beside_the_living(engines, pool):
    await engines[1].stop()
    assert [status.url.endswith(engine.address) for status, engine in zip(await pool.status(), engines, strict=True)]
    assert not (await pool.status())[1].healthy


async def test_an_abort_of_a_request_that_is_not_known_is_told_to_all(engines, pool):
    await pool.abort("someone-elses")
    assert [engine.aborted for engine in engines] == [["someone-elses"]] * 3


def test_a_pool_without_engines_says_what_it_needs():
    with pytest.raises(ConfigError, match="at least one"):
        EnginePool([])
    with pytest.raises(ConfigError, match="twice"):
        EnginePool(["a:1", "a:1"])
