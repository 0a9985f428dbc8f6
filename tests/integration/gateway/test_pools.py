"""Pools of hosts behind a real gateway: what cannot be had or kept has a cause, and the others go on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from envfarm.core.errors import FarmError, IsolationError, Unavailable
from envfarm.core.pool import PoolState
from envfarm.core.sandbox import Isolation
from envfarm.core.task import Task
from envfarm.wire.channel import connect
from envfarm.wire.farm_client import FarmClient
from sandboxes.isolation.gvisor import require_runsc

HOUSES = Path(__file__).parent / "houses.py"


def house(name):
    return f"{HOUSES}:{name}"


async def open_house(client, name, timeout=20.0):
    return await client.open(
        environment=house(name),
        task=Task(id="t", prompt="go"),
        seed=1,
        request_id=f"{name}-{id(object())}",
        timeout=timeout,
    )


async def status(gateway):
    async with connect(gateway.address, token=gateway.token) as channel:
        return await FarmClient(channel).status()


async def test_a_pool_that_cannot_be_had_fails_its_own_opens_with_the_cause_and_no_others(make_gateway, shop):
    gateway = make_gateway("--slots", "2", "--environment", house("Imaged")).start()
    async with gateway.client() as client:
        with pytest.raises(Unavailable, match=r"no-such-image:1.*--backend docker") as refused:
            await open_house(client, "Imaged", timeout=0.5)
        assert refused.value.retry_after_s > 0
        assert (await shop.open(client)).episode_id
    own, imaged = (await status(gateway)).pools
    assert (own.image, own.state, own.cause, own.hosts[0].busy) == ("", PoolState.READY, "", 1)
    assert (imaged.image, imaged.state, imaged.environments) == (
        "no-such-image:1",
        PoolState.DOWN,
        (house("Imaged"),),
    )
    assert "has no image" in imaged.cause
    assert imaged.retry_in_s is not None


def test_an_operator_sees_pools_causes_and_back_offs(make_gateway):
    gateway = make_gateway("--slots", "2", "--environment", house("Imaged")).start()
    argv = [sys.executable, "-m", "envfarm.cli.main", "hosts", "--gateway", gateway.address]
    argv += ["--token-file", str(gateway.state / "token")]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "no-such-image:1" in shown
    assert "down 0/1" in shown
    assert "ready 1/1" in shown
    assert "tried again in" in shown
    told = json.loads(subprocess.run([*argv, "--json"], capture_output=True, text=True, check=True, timeout=60).stdout)
    assert [pool["state"] for pool in told["pools"]] == ["ready", "down"]


async def test_an_environment_that_kills_its_host_again_and_again_is_held_back_and_the_others_go_on(make_gateway, shop):
    gateway = make_gateway("--slots", "2", "--environment", house("Crashing")).start()
    async with gateway.client() as client:
        with pytest.raises(Unavailable, match="held back: 3 hosts were lost"):
            await open_house(client, "Crashing", timeout=20)
        (held,) = (await status(gateway)).suspended
        assert held.environment == house("Crashing")
        assert "status 3" in held.cause
        with pytest.raises(Unavailable, match="held back"):
            await open_house(client, "Crashing", timeout=1)
        assert (await shop.open(client, timeout=40)).episode_id


async def test_a_level_that_cannot_be_had_fails_the_opening_with_what_to_use(make_gateway):
    gateway = make_gateway("--slots", "2", "--environment", house("Boxed")).start()
    async with gateway.client() as client:
        with pytest.raises(IsolationError, match="not pod"):
            await open_house(client, "Boxed")


async def test_the_level_that_was_reached_is_told_with_the_opening(make_gateway, shop):
    try:
        require_runsc()
    except FarmError as error:
        pytest.skip(str(error))
    gateway = make_gateway("--slots", "2", "--environment", house("Deep"), "--environment", house("Flat")).start()
    async with gateway.client() as client:
        for name, level, kernel in (("Deep", Isolation.GVISOR, True), ("Flat", Isolation.BWRAP, False)):
            opened = await open_house(client, name)
            assert opened.isolation is level
            answer = await client.step(opened.handle, 0, shop.says(("uname", {})), timeout=40)
            assert ("4.4.0" in answer.results[0].content) is kernel
            await client.close(opened.handle)
