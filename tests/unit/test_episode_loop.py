"""One episode against a scripted engine and a gateway in memory: every end has an outcome and a cause."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

import numpy as np
import pytest

from envfarm.core.engine import EngineStatus, GenerateRequest, Generation, VersionSpan
from envfarm.core.episode import Opened, StepAnswer
from envfarm.core.errors import EngineError, EnvironmentCodeError, FarmError, PolicyError, SlotLost, Unavailable
from envfarm.core.log import Appended, LogRecord
from envfarm.core.messages import AssistantMessage, Diagnosis, Message, ToolResult, ToolSchema, ToolStatus
from envfarm.core.outcome import Outcome, OutcomeKind
from envfarm.core.rewards import RewardSettings
from envfarm.core.sandbox import Isolation
from envfarm.core.task import Limits, Task
from envfarm.core.trajectory import Trajectory
from envfarm.rollout.episode import Episode, EpisodeSpec, Phase
from envfarm.rollout.ports import PolicySide
from envfarm.rollout.sampling import within_context
from envfarm.rollout.scripted import ScriptedEngine
from envfarm.rollout.tokens import PolicyTokenizer
from envfarm.rollout.tokens.template import TemplateBuilder
from trainer_bridge.warmup_tokenizer import train_tokenizer

LOOK = '<tool_call>\n{"name": "look", "arguments": {"at": "door"}}\n</tool_call>'
ANSWER = '<tool_call>\n{"name": "answer", "arguments": {"value": 4}}\n</tool_call>'
SCHEMA = '{"type":"object","properties":{"at":{"type":"string"},"value":{"type":"integer"}}}'
TOOLS = (
    ToolSchema(name="look", description="Looks.", parameters=SCHEMA),
    ToolSchema(name="answer", description="Answers.", parameters=SCHEMA, ends=True),
)
TASK = Task(id="door-1", prompt="What is behind the door?")


@functools.cache
def tokens() -> TemplateBuilder:
    return TemplateBuilder(PolicyTokenizer(train_tokenizer(["look at the door answer value"] * 3, 300)))


def encode(text: str) -> list[int]:
    return tokens()._tokenizer.encode(text)


class Gateway:
    """Plays the gateway: an environment whose ``answer`` tool ends it with completion 1."""

    def __init__(self, limits: Limits | None = None, *, failure: FarmError | None = None) -> None:
        self.limits = limits or Limits(seconds=30)
        self.failure = failure  # raised by the second step
        self.opening: FarmError | None = None
        self.steps: list[dict[str, object]] = []
        self.closed: list[str] = []
        self.stepping = asyncio.Event()
        self.hang = False

    async def tasks(self, environment: str, split: str, offset: int, limit: int) -> list[Task]:
        return [TASK][offset : offset + limit]

    async def open(
        self,
        *,
        environment: str,
        task: Task,
        seed: int,
        run_id: str = "",
        reward: RewardSettings | None = None,
        request_id: str,
        timeout: float,
    ) -> Opened:
        if self.opening is not None:
            raise self.opening
        return Opened(
            handle="handle",
            episode_id="ep",
            messages=(Message(role="user", content=str(task.prompt)),),
            tools=TOOLS,
            catalogue="catalogue",
            limits=self.limits,
            isolation=Isolation.NONE,
            environment=f"{environment}@1",
        )

    async def step(
        self,
        handle: str,
        index: int,
        action: AssistantMessage,
        *,
        sampled_tokens: int | None = None,
        truncated: bool = False,
        limit: str = "",
        timeout: float,
    ) -> StepAnswer:
        self.stepping.set()
        if self.hang:
            await asyncio.sleep(timeout)
        if self.failure is not None and index == 1:
            raise self.failure
        self.steps.append(
            {"index": index, "action": action, "tokens": sampled_tokens, "truncated": truncated, "limit": limit}
        )
        done = bool(limit) or any(call.name == "answer" for call in action.tool_calls)
        outcome = (Outcome.truncated(limit) if limit else Outcome.completed()) if done else None
        return StepAnswer(
            index=index,
            messages=()
            if done
            else tuple(Message(role="tool", content="dark", name=c.name, tool_call_id=c.id) for c in action.tool_calls)
            or (Message(role="user", content="Go on."),),
            results=tuple(
                ToolResult(call_id=c.id, name=c.name, status=ToolStatus.OK, content="dark") for c in action.tool_calls
            ),
            parts={"completion": (0.0 if limit else 1.0) if done else None, "format": 0.1},
            reward=1.1 if done and not limit else 0.1,
            done=done,
            outcome=outcome,
            diagnosis=action.diagnosis,
            seconds=0.01,
        )

    async def close(self, handle: str, reason: str = "") -> None:
        self.closed.append(reason)


class NoLog:
    async def append(self, records: Sequence[LogRecord], *, timeout: float) -> list[Appended]:
        raise AssertionError("an episode does not write to the log")


class Hanging:
    """An engine that brings ``partial`` only when it is aborted; what ends a request is noted."""

    def __init__(self, partial: list[int]) -> None:
        self.partial = partial
        self.started = asyncio.Event()
        self.aborted: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    async def generate(self, request: GenerateRequest, *, timeout: float) -> Generation:
        end = self._ends[request.rid] = asyncio.Event()
        self.started.set()
        await end.wait()
        count = len(self.partial)
        return Generation(
            output_ids=self.partial,
            logprobs=[-1.0] * count,
            finish="abort",
            versions=(VersionSpan(3, 0, count),) if count else (),
        )

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)
        self._ends[rid].set()

    async def update_weights_from_disk(self, path: str, *, version: int, timeout: float) -> None: ...

    async def status(self) -> list[EngineStatus]:
        return []

    async def close(self) -> None: ...


class Replies(Hanging):
    """An engine that gives these generations, or raises them, in order."""

    def __init__(self, *replies: Generation | FarmError) -> None:
        super().__init__([])
        self.replies = list(replies)
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest, *, timeout: float) -> Generation:
        self.requests.append(request)
        reply = self.replies.pop(0)
        if isinstance(reply, FarmError):
            raise reply
        return reply


def spec(**changes: object) -> EpisodeSpec:
    fields = {
        "run_id": "run",
        "group_id": "group",
        "group_size": 2,
        "member": 1,
        "attempt": 0,
        "last_attempt": False,
        "purpose": "train",
        "environment": "door",
        "split": "train",
        "task": TASK,
        "seed": 7,
        "temperature": 1.0,
    }
    return EpisodeSpec(**(fields | changes))  # type: ignore[arg-type]


def scripted(*answers: str) -> ScriptedEngine:
    return ScriptedEngine(tokens()._tokenizer, answers, version=5)


def generation(text: str, finish: str = "stop", *spans: VersionSpan) -> Generation:
    ids = encode(text)
    return Generation(
        output_ids=ids,
        logprobs=[-0.5] * len(ids),
        finish=finish,  # type: ignore[arg-type]
        versions=spans or (VersionSpan(1, 0, len(ids)),),
    )


async def play(gateway: Gateway, engine: object, **changes: object) -> Trajectory:
    side = PolicySide(episodes=gateway, engine=engine, tokens=tokens(), log=NoLog(), name="tiny")  # type: ignore[arg-type]
    return await Episode(spec(**changes), side).run(asyncio.Semaphore(1))


async def test_a_completed_episode_is_recorded_token_by_token() -> None:
    gateway = Gateway()
    trajectory = await play(gateway, scripted(LOOK, ANSWER))
    assert trajectory.outcome == Outcome.completed()
    assert trajectory.final
    assert trajectory.reward == pytest.approx(1.2)
    assert [step.diagnosis for step in trajectory.steps] == [Diagnosis.OK, Diagnosis.OK]
    assert (trajectory.id, trajectory.environment, trajectory.policy) == ("group.1.0", "door@1", "tiny")
    (segment,) = trajectory.segments
    end = tokens().stop_token_ids[0]
    text = tokens()._tokenizer.decode(segment.token_ids.tolist())
    assert text.endswith(
        f"{LOOK}<|im_end|>\n<|im_start|>user\n<tool_response>\ndark\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{ANSWER}<|im_end|>"
    )
    sampled = segment.mask == 1
    assert segment.token_ids[sampled].tolist() == [*encode(LOOK), end, *encode(ANSWER), end]
    assert set(segment.versions[sampled].tolist()) == {5}
    assert segment.steps[sampled].tolist() == [0] * (len(encode(LOOK)) + 1) + [1] * (len(encode(ANSWER)) + 1)
    assert (segment.versions[~sampled] == -1).all()
    assert (segment.steps[~sampled] == -1).all()
    assert np.isnan(segment.logprobs[~sampled]).all()
    assert not np.isnan(segment.logprobs[sampled]).any()
    assert gateway.closed == [""]


async def test_sampling_depends_on_group_seed_member_attempt_and_step_alone() -> None:
    async def seeds(**changes: object) -> list[int | None]:
        engine = Replies(generation(LOOK + "<|im_end|>"), generation(ANSWER + "<|im_end|>"))
        await play(Gateway(), engine, **changes)
        return [request.sampling.sampling_seed for request in engine.requests]

    first = await seeds()
    assert first == await seeds(group_id="another name")
    assert first[0] != first[1]
    for change in ({"seed": 8}, {"member": 0}, {"attempt": 1}):
        assert not set(first) & set(await seeds(**change))


@pytest.mark.parametrize("error", [SlotLost("host died"), Unavailable("no gateway"), EnvironmentCodeError("tool")])
async def test_a_gateway_s_error_is_an_infrastructure_failure_without_reward(error: FarmError) -> None:
    gateway = Gateway(failure=error)
    trajectory = await play(gateway, scripted(LOOK, ANSWER))
    assert trajectory.outcome == Outcome.infra_failed(f"{error.code}: {error}")
    assert trajectory.reward is None
    assert [step.reward for step in trajectory.steps] == [None]
    assert not trajectory.final
    assert len(gateway.closed) == 1


async def test_an_episode_that_cannot_open_fails_with_its_cause_and_no_tokens() -> None:
    gateway = Gateway()
    gateway.opening = EnvironmentCodeError("reset raised ValueError")
    trajectory = await play(gateway, scripted(LOOK), last_attempt=True)
    assert trajectory.outcome == Outcome.infra_failed("environment: reset raised ValueError")
    assert (trajectory.segments, trajectory.steps, trajectory.final) == ((), (), True)
    assert gateway.closed == []


async def test_an_engine_s_error_is_an_infrastructure_failure() -> None:
    trajectory = await play(Gateway(), Replies(generation(LOOK + "<|im_end|>"), EngineError("out of memory")))
    assert trajectory.outcome == Outcome.infra_failed("engine: out of memory")
    assert trajectory.sampled_tokens == len(encode(LOOK)) + 1


async def test_tokens_without_a_policy_version_are_refused() -> None:
    reply = generation(LOOK, "stop", VersionSpan(1, 1, 4))
    trajectory = await play(Gateway(), Replies(reply))
    assert trajectory.outcome.kind is OutcomeKind.INFRA_FAILED
    assert "policy version" in trajectory.outcome.detail


async def test_a_policy_s_own_fault_ends_the_episode_as_such() -> None:
    trajectory = await play(Gateway(failure=PolicyError("nonsense")), scripted(LOOK))
    assert trajectory.outcome == Outcome.policy_failed("nonsense")
    assert trajectory.reward == pytest.approx(0.1)
    assert trajectory.final


async def test_a_fault_of_the_worker_itself_is_data_too() -> None:
    class Broken(Hanging):
        async def generate(self, request: GenerateRequest, *, timeout: float) -> Generation:
            raise ZeroDivisionError("bug")

    gateway = Gateway()
    trajectory = await play(gateway, Broken([]))
    assert trajectory.outcome == Outcome.infra_failed("worker: ZeroDivisionError: bug")
    assert len(gateway.closed) == 1


async def test_a_call_that_was_cut_off_is_answered_and_its_turn_is_closed_for_it() -> None:
    cut = LOOK[:30]
    gateway = Gateway()
    trajectory = await play(gateway, Replies(generation(cut, "length"), generation(ANSWER + "<|im_end|>")))
    assert [step.diagnosis for step in trajectory.steps] == [Diagnosis.TRUNCATED, Diagnosis.OK]
    assert [(step["truncated"], step["limit"]) for step in gateway.steps] == [(True, ""), (False, "")]
    (segment,) = trajectory.segments
    after = int(np.flatnonzero(segment.steps == 0)[-1]) + 1
    assert segment.token_ids[after] == tokens().stop_token_ids[0]
    assert segment.mask[after] == 0


async def test_plain_text_that_was_cut_off_ends_the_episode_at_its_token_limit() -> None:
    gateway = Gateway()
    trajectory = await play(gateway, Replies(generation("the door", "length")))
    assert trajectory.outcome == Outcome.truncated("tokens")
    assert gateway.steps[-1]["limit"] == "tokens"


async def test_an_exhausted_context_ends_the_episode_in_the_step_that_filled_it() -> None:
    start = len(tokens().start([Message(role="user", content=str(TASK.prompt))], TOOLS))
    gateway = Gateway(Limits(seconds=30, context_tokens=start + 8))
    trajectory = await play(gateway, scripted(LOOK))
    assert trajectory.outcome == Outcome.truncated("context")
    assert trajectory.sampled_tokens == 8
    assert sum(len(s.token_ids) for s in trajectory.segments) == start + 8


async def test_a_context_that_the_engine_does_not_have_is_a_limit_and_no_error() -> None:
    start = len(tokens().start([Message(role="user", content=str(TASK.prompt))], TOOLS))

    class Short(ScriptedEngine):
        async def status(self) -> list[EngineStatus]:
            return [EngineStatus(url="", model_path="", version=5, context_tokens=n) for n in (start + 8, 4096)]

    engine = Short(tokens()._tokenizer, [LOOK])
    side = PolicySide(episodes=Gateway(), engine=engine, tokens=tokens(), log=NoLog())
    trajectory = await Episode(spec(), await within_context(side)).run(asyncio.Semaphore(1))
    assert trajectory.outcome == Outcome.truncated("context")
    assert trajectory.sampled_tokens == 8


async def test_a_context_filled_by_a_reply_ends_the_episode_with_an_empty_step() -> None:
    start = len(tokens().start([Message(role="user", content=str(TASK.prompt))], TOOLS))
    gateway = Gateway(Limits(seconds=30, context_tokens=start + len(encode(LOOK)) + 3))
    trajectory = await play(gateway, scripted(LOOK))
    assert trajectory.outcome == Outcome.truncated("context")
    assert [(step["tokens"], step["limit"]) for step in gateway.steps] == [(len(encode(LOOK)) + 1, ""), (0, "context")]
    assert trajectory.segments[0].mask[-1] == 1  # what no engine saw is not part of the record


async def test_a_request_that_somebody_else_aborted_goes_on_where_it_stopped() -> None:
    half, rest = LOOK[:25], LOOK[25:] + "<|im_end|>"
    engine = Replies(
        generation(half, "abort", VersionSpan(1, 0, len(encode(half)))),
        generation(rest, "stop", VersionSpan(2, 0, len(encode(rest)))),
        generation(ANSWER + "<|im_end|>"),
    )
    trajectory = await play(Gateway(), engine)
    assert trajectory.outcome == Outcome.completed()
    first, second, _ = engine.requests
    assert list(second.input_ids) == [*first.input_ids, *encode(half)]
    assert second.sampling.max_new_tokens == first.sampling.max_new_tokens - len(encode(half))
    assert second.rid != first.rid
    (segment,) = trajectory.segments
    assert segment.versions[segment.steps == 0].tolist() == [1] * len(encode(half)) + [2] * len(encode(rest))


async def test_time_that_runs_out_while_sampling_ends_the_episode_with_what_was_sampled() -> None:
    engine = Hanging(encode("the door"))
    trajectory = await play(Gateway(Limits(seconds=0.05)), engine)
    assert trajectory.outcome == Outcome.truncated("time")
    assert engine.aborted == ["group.1.0.0"]
    assert trajectory.sampled_tokens == len(encode("the door"))


async def test_an_engine_that_brings_nothing_in_time_is_the_farm_s_fault() -> None:
    trajectory = await play(Gateway(Limits(seconds=0.05)), Hanging([]))
    assert trajectory.outcome.kind is OutcomeKind.INFRA_FAILED
    assert "no token" in trajectory.outcome.detail


async def test_aborting_ends_the_engine_s_request_closes_the_episode_and_records_by_whom() -> None:
    gateway, engine = Gateway(), Hanging([])
    side = PolicySide(episodes=gateway, engine=engine, tokens=tokens(), log=NoLog())
    episode = Episode(spec(), side)
    async with asyncio.TaskGroup() as group:
        run = group.create_task(episode.run(asyncio.Semaphore(1)))
        await engine.started.wait()
        assert episode.phase is Phase.ENGINE
        episode.abort("shutdown")
    trajectory = run.result()
    assert trajectory.outcome == Outcome.aborted("shutdown")
    assert trajectory.final
    assert engine.aborted
    assert gateway.closed == ["shutdown"]


async def test_cancelling_cleans_up_just_the_same() -> None:
    gateway, engine = Gateway(), Hanging([])
    task = asyncio.create_task(play(gateway, engine))
    await engine.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.aborted
    assert len(gateway.closed) == 1


async def test_an_episode_that_waits_for_a_place_can_be_aborted() -> None:
    side = PolicySide(episodes=Gateway(), engine=Hanging([]), tokens=tokens(), log=NoLog())
    episode = Episode(spec(), side)
    async with asyncio.TaskGroup() as group:
        run = group.create_task(episode.run(asyncio.Semaphore(0)))
        group.create_task(asyncio.sleep(0)).add_done_callback(lambda _: episode.abort("a person"))
    assert run.result().outcome == Outcome.aborted("a person")


async def test_a_step_that_outlives_every_budget_is_cut_by_the_episode_s_deadline() -> None:
    gateway = Gateway(Limits(seconds=0.05, verify_seconds=0.05))
    gateway.hang = True
    trajectory = await play(gateway, scripted(LOOK))
    assert trajectory.outcome == Outcome.truncated("time")
    assert gateway.steps[-1]["limit"] == "time"
