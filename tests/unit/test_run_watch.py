"""The trainer's view of its run while the registry comes and goes."""

import asyncio

import pytest

from envfarm.core.errors import ConfigError, DeadlineExceeded, Unavailable
from envfarm.core.run import Run, RunSettings, RunState
from trainer_bridge import run_watch
from trainer_bridge.run_watch import RunWatch

RUN = Run(id="r", name="r", settings=RunSettings(environment="e"), state=RunState.PAUSED, cause="a person")


class Registry:
    """Answers in turn with what it was given; errors are raised, the last answer is repeated."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.answered = asyncio.Event()

    async def get(self, run_id):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        self.answered.set()
        return answer


async def test_a_registry_that_is_away_or_does_not_answer_leaves_the_last_known_state_standing(monkeypatch):
    monkeypatch.setattr(run_watch, "POLL_SECONDS", 0.0)
    stopped = Run(id="r", name="r", settings=RUN.settings, state=RunState.STOPPED, cause="enough")
    registry = Registry(Unavailable("gone"), DeadlineExceeded("silent"), stopped)
    watch = RunWatch(registry, RUN)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        follower = tasks.create_task(watch.follow())
        assert watch.paused
        await registry.answered.wait()
        follower.cancel()
    assert watch.stopping
    assert watch.cause == "the run was stopped (enough)"


async def test_a_run_that_does_not_exist_any_more_is_no_passing_trouble(monkeypatch):
    monkeypatch.setattr(run_watch, "POLL_SECONDS", 0.0)
    with pytest.raises(ConfigError, match="no run"):
        await RunWatch(Registry(ConfigError("no run")), RUN).follow()
