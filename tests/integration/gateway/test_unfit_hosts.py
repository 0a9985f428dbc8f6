"""A host whose slots cannot be made clean is replaced, and its cause is seen."""

import asyncio

import pytest

from envfarm.core.task import Task

_STUCK = """
import time
from envfarm import Environment, Limits, RewardSettings, Task, tool


class Stuck(Environment):
    \"\"\"Its tool sits in C.\"\"\"

    limits = Limits(tool_seconds=0.2, seconds=60)
    reward = RewardSettings(weights={"completion": 1.0})

    def tasks(self, split):
        return [Task(id="one", prompt="go")]

    def reset(self, task):
        return "go"

    @tool
    def hang(self) -> None:
        \"\"\"Hang.\"\"\"
        time.sleep(300)
"""


@pytest.mark.slow
async def test_a_host_all_of_whose_slots_hang_is_replaced(make_gateway, shop, tmp_path):
    file = tmp_path / "stuck.py"
    file.write_text(_STUCK)
    name = f"{file}:Stuck"
    gateway = make_gateway("--environment", name, "--slots", "1").start()
    (before,) = gateway.hosts
    async with gateway.client() as client:
        task = Task(id="one", prompt="go")
        opened = await client.open(environment=name, task=task, seed=1, request_id="a", timeout=20.0)
        await client.step(opened.handle, 0, shop.says(("hang", {})), timeout=20.0)
        await client.close(opened.handle)
        again = await client.open(environment=name, task=task, seed=1, request_id="b", timeout=50.0)
        await client.close(again.handle)
    (after,) = gateway.hosts
    assert after.pid != before.pid
    said = await asyncio.to_thread(lambda: gateway.log)
    assert "slot in quarantine" in said
    assert "it is unfit: 1 of its 1 slots are in quarantine" in said
