"""A client that dies gives its slots back soon; one that only thinks keeps them."""

import asyncio
import subprocess
import sys

from envfarm.wire.channel import connect
from envfarm.wire.episode_client import EpisodeClient
from envfarm.wire.leases import Leases

_CLIENT = """
import asyncio, sys
from envfarm.core.task import Task
from envfarm.wire.channel import connect
from envfarm.wire.episode_client import EpisodeClient

async def main(address, token, environment):
    async with connect(address, token=token) as channel, EpisodeClient(channel, lease=2.0) as client:
        task = Task(id="train-0", prompt="go")
        await client.open(environment=environment, task=task, seed=7, request_id="one", timeout=20.0)
        print("open", flush=True)
        await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


def _client(gateway, environment):
    argv = [sys.executable, "-c", _CLIENT, gateway.listen, gateway.token, environment]
    return subprocess.Popen(argv, stdout=subprocess.PIPE)


async def test_a_killed_clients_slot_is_free_again_when_its_lease_ends(make_gateway, shop):
    gateway = make_gateway("--slots", "1").start()
    with await asyncio.to_thread(_client, gateway, shop.environment) as other:
        assert await asyncio.to_thread(other.stdout.readline) == b"open\n"
        async with gateway.client() as client:
            waiting = asyncio.create_task(shop.open(client, timeout=30.0))
            done, _ = await asyncio.wait([waiting], timeout=4.0)  # twice the lease: it lives, so it keeps its slot
            assert not done
            other.kill()
            opened = await waiting
            await client.close(opened.handle)


async def test_a_client_that_thinks_for_longer_than_its_lease_keeps_its_episode(gateway, shop):
    async with (
        connect(gateway.listen, token=gateway.token) as channel,
        EpisodeClient(channel, lease=1.2) as client,
    ):
        opened = await shop.open(client)
        await asyncio.sleep(3.6)
        answer = await client.step(opened.handle, 0, shop.says(content="hm"), timeout=20.0)
        assert answer.outcome is None or "lost" not in str(answer.outcome)
        await client.close(opened.handle)


async def test_what_a_gateway_says_is_gone_is_not_renewed_any_more():
    asked = []
    twice = asyncio.Event()

    async def touch(handles, timeout):
        asked.append(sorted(handles))
        if len(asked) == 2:
            twice.set()
        return ["b"]

    async with Leases(touch, 0.04) as leases:
        leases.want("a")
        leases.want("b")
        async with asyncio.timeout(10):
            await twice.wait()
    assert asked[:2] == [["a", "b"], ["a"]]
