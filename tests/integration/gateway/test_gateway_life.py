"""The life of a gateway process: start, refusal to start, drain, lost hosts, its own death."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from envfarm.core.errors import Unavailable


def _last_line(gateway):
    return gateway.log.strip().splitlines()[-1]


def test_two_farms_on_one_port_are_told_apart_in_one_line(make_gateway):
    first = make_gateway("--slots", "1", name="first").start()
    second = make_gateway("--slots", "1", name="second", listen=first.address)
    assert second.spawn().wait(60) == 1
    assert f"cannot listen on {first.address}: the address is in use" in second.log
    assert "Traceback" not in second.log
    assert not second.hosts


def test_two_farms_on_one_state_folder_are_told_apart_in_one_line(make_gateway):
    first = make_gateway("--slots", "1").start()
    second = make_gateway("--slots", "1")
    address = first.address
    assert second.spawn().wait(60) == 1
    assert f"is in use by another gateway (process {first.process.pid})" in _last_line(second)
    (first.state / "address").write_text(address)
    assert len(first.hosts) == 1


def test_an_unknown_backend_or_environment_is_named(make_gateway):
    gateway = make_gateway("--backend", "locla")
    assert gateway.spawn().wait(60) == 1
    assert "no backend named 'locla'; did you mean 'local'?" in _last_line(gateway)


def test_token_and_key_are_for_the_owner_alone(make_gateway):
    gateway = make_gateway("--slots", "1").start()
    assert (gateway.state.stat().st_mode & 0o777) == 0o700
    for name in ("token", "key"):
        assert ((gateway.state / name).stat().st_mode & 0o777) == 0o600
        assert (gateway.state / name).read_text().strip() not in gateway.log


async def test_sigterm_finishes_steps_in_flight_refuses_opens_and_leaves_no_process(make_gateway, shop, tmp_path):
    gateway = make_gateway("--slots", "2").start()
    async with gateway.client() as client:
        opened = await shop.open(client)
        wait = shop.says(("wait_for", {"path": str(tmp_path / "go")}))
        step = asyncio.create_task(client.step(opened.handle, 0, wait, timeout=30))
        await shop.until((tmp_path / "go.started").exists)
        gateway.process.send_signal(signal.SIGTERM)
        await shop.until(lambda: "draining" in gateway.log)
        with pytest.raises(Unavailable, match="shutting down"):
            await shop.open(client, timeout=0.5)
        assert not step.done()
        (tmp_path / "go").touch()
        assert (await step).results[0].content == "waited, call 1"
    assert await asyncio.to_thread(gateway.process.wait, 30) == 0
    assert gateway.hosts == []


def test_hosts_stay_when_told_to_and_are_adopted(make_gateway):
    gateway = make_gateway("--slots", "1", "--keep-hosts").start()
    (host,) = gateway.hosts
    assert gateway.terminate() == 0
    assert host.is_running()
    gateway.start()
    assert [h.pid for h in gateway.hosts] == [host.pid]


async def test_a_killed_host_ends_its_episodes_with_a_cause_and_is_replaced(make_gateway, shop, tmp_path):
    gateway = make_gateway("--slots", "2").start()
    (host,) = gateway.hosts
    async with gateway.client() as client:
        running, idle = await shop.open(client), await shop.open(client)
        wait = shop.says(("wait_for", {"path": str(tmp_path / "never")}))
        step = asyncio.create_task(client.step(running.handle, 0, wait, timeout=60))
        await shop.until((tmp_path / "never.started").exists)
        os.killpg(host.pid, signal.SIGKILL)
        answer = await asyncio.wait_for(step, 20)
        assert answer.done
        assert answer.outcome.kind == "infra_failed"
        assert "was lost" in answer.outcome.detail
        assert answer.reward is None
        again = await client.step(idle.handle, 0, shop.says(("sell", {"pieces": 1})), timeout=20)
        assert again.outcome.kind == "infra_failed"
        await client.close(idle.handle)
        fresh = await shop.open(client, timeout=40)
        assert (await client.step(fresh.handle, 0, shop.says(("sell", {"pieces": 1})), timeout=20)).reward is not None
    assert [h.pid for h in gateway.hosts] != [host.pid]


@pytest.mark.chaos
async def test_a_gateway_killed_again_and_again_costs_no_episode_and_repeats_no_step(make_gateway, shop):
    gateway = make_gateway("--slots", "16", "--keep-hosts").start()
    hosts = [h.pid for h in gateway.hosts]
    taken = 0

    async def episode(client):
        nonlocal taken
        opened = await shop.open(client, timeout=60)
        for index in range(60):
            answer = await client.step(opened.handle, index, shop.says(("sell", {"pieces": index})), timeout=60)
            assert answer.results[0].content == f"sold {index}, call {index + 1}"  # it ran exactly once
            taken += 1
            await asyncio.sleep(0.02)  # the policy thinks
        last = await client.step(opened.handle, 60, shop.says(("finish", {"right": True})), timeout=60)
        assert last.outcome.kind == "completed"
        await client.close(opened.handle)

    async def killer():
        for share in (0.2, 0.5, 0.8):
            await shop.until(lambda share=share: taken > share * 16 * 60, 60)
            gateway.kill()
            await asyncio.to_thread(gateway.start)

    async with gateway.client() as client, asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(episode(client))
        group.create_task(killer())
    assert [h.pid for h in gateway.hosts] == hosts


async def test_an_idle_client_outlives_its_gateway(make_gateway, shop):
    gateway = make_gateway("--slots", "1", "--keep-hosts").start()
    async with gateway.client() as client:
        opened = await shop.open(client)
        gateway.kill()
        await asyncio.to_thread(gateway.start)
        answer = await client.step(opened.handle, 0, shop.says(("sell", {"pieces": 1})), timeout=30)
        assert answer.results[0].content == "sold 1, call 1"


def test_a_state_folder_that_cannot_be_used_is_named(make_gateway, tmp_path):
    gateway = make_gateway()
    gateway.state = tmp_path / "file" / "state"
    Path(tmp_path / "file").touch()
    gateway.state = tmp_path / "log-only"
    gateway.state.mkdir()
    gateway.flags = ("--state", str(tmp_path / "file" / "state"))
    assert gateway.spawn().wait(60) == 1
    assert "cannot use the state folder" in _last_line(gateway)
