"""One episode: open, sample, parse, step, append, until it ends. Whatever happens, there is an outcome and a cause."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Callable

import msgspec

from envfarm.core.deadline import Deadline
from envfarm.core.engine import SamplingParams
from envfarm.core.episode import Opened, StepAnswer
from envfarm.core.errors import FarmError, PolicyError, WireError
from envfarm.core.ids import new_id, sampling_seed
from envfarm.core.messages import AssistantMessage, Diagnosis, Message, ToolStatus
from envfarm.core.outcome import Outcome, OutcomeKind
from envfarm.core.rewards import RewardSettings
from envfarm.core.sandbox import Isolation
from envfarm.core.task import Task
from envfarm.core.trajectory import Purpose, StepRecord, Trajectory
from envfarm.rollout.ports import PolicySide
from envfarm.rollout.recording import SegmentRecorder
from envfarm.rollout.sampling import Answer, sample_answer

log = logging.getLogger(__name__)
OPEN_SECONDS = 120.0
"""Wait for a free slot and for ``reset`` together."""
CLOSE_SECONDS = 5.0


class Phase(enum.StrEnum):
    """What an episode waits for."""

    PLACE = "a place in this worker"
    OPEN = "a slot"
    ENGINE = "the engine"
    STEP = "the environment"
    CLOSE = "closing"


class EpisodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which attempt at which task this is. ``seed`` is the group's; what is sampled follows from it."""

    run_id: str
    group_id: str
    group_size: int
    member: int
    attempt: int
    last_attempt: bool
    purpose: Purpose
    environment: str
    split: str
    task: Task
    seed: int
    temperature: float
    reward: RewardSettings | None = None
    labels: dict[str, str] = {}
    max_tokens: int | None = None  # per step; the environment's own limit holds too

    @property
    def id(self) -> str:
        """Id of the trajectory: the same attempt has the same id, wherever it runs."""
        return f"{self.group_id}.{self.member}.{self.attempt}"

    def sampling_seed(self, step: int) -> int:
        """31-bit seed of one answer."""
        return sampling_seed(self.seed, self.member, self.attempt, step)


class Episode:
    """Runs one attempt. ``on_step`` is called after every step, before the episode goes on."""

    def __init__(
        self, spec: EpisodeSpec, side: PolicySide, *, on_step: Callable[[StepRecord], None] | None = None
    ) -> None:
        self.spec = spec
        self.phase = Phase.PLACE
        self.since = time.monotonic()
        self._side = side
        self._on_step = on_step
        self._recorder = SegmentRecorder()
        self._steps: list[StepRecord] = []
        self._opened: Opened | None = None
        self._started_at = time.time()
        self._aborted_by: str | None = None
        self._scope: asyncio.Timeout | None = None

    def abort(self, by: str) -> None:
        """End the episode as ``aborted(by)``; :meth:`run` returns once everything is cleaned up.

        An episode that is over but for its closing is left alone.
        """
        if self._aborted_by is not None or self.phase is Phase.CLOSE:
            return
        self._aborted_by = by
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def run(self, places: asyncio.Semaphore) -> Trajectory:
        """Wait for a place, run, and return the record. Raises nothing but cancellation, which also cleans up."""
        outcome = await self._outcome(places)
        return self._trajectory(outcome)

    async def _outcome(self, places: asyncio.Semaphore) -> Outcome:
        try:
            async with asyncio.timeout(None) as self._scope:
                if self._aborted_by is not None:
                    return Outcome.aborted(self._aborted_by)
                async with places:
                    return await self._play()
        except Exception as error:  # whatever broke, the attempt has an outcome and is recorded
            return self._failure(error)

    def _failure(self, error: Exception) -> Outcome:
        if self._aborted_by is not None:
            return Outcome.aborted(self._aborted_by)
        if isinstance(error, PolicyError):
            return Outcome.policy_failed(str(error))
        if isinstance(error, FarmError):
            return Outcome.infra_failed(f"{error.code}: {error}")
        log.error("episode %s broke in the worker", self.spec.id, exc_info=error)
        return Outcome.infra_failed(f"worker: {type(error).__name__}: {error}")

    async def _play(self) -> Outcome:
        self._started_at = time.time()
        self._enter(Phase.OPEN)
        spec = self.spec
        opened = self._opened = await self._side.episodes.open(
            environment=spec.environment,
            task=spec.task,
            seed=spec.seed,
            run_id=spec.run_id,
            reward=spec.reward,
            request_id=new_id("open"),
            timeout=OPEN_SECONDS,
        )
        ended = False
        try:
            outcome = await self._converse(opened, Deadline.after(opened.limits.seconds))
            ended = True
            return outcome
        finally:
            self._enter(Phase.CLOSE)
            await self._close(opened.handle, "" if ended else self._aborted_by or "the worker gave it up")

    async def _converse(self, opened: Opened, deadline: Deadline) -> Outcome:
        tokens = self._side.tokens
        history = list(opened.messages)
        prompt_ids = tokens.start(history, opened.tools)
        self._recorder.begin(prompt_ids)
        for index in range(opened.limits.steps):
            answer = await self._sample(index, prompt_ids, opened, deadline)
            output_ids = answer.token_ids if answer else []
            step = await self._step(index, prompt_ids, answer, opened, deadline)
            if step.done:
                return step.outcome or Outcome.infra_failed("the gateway ended the episode without an outcome")
            history.append(self._steps[-1].message)
            extension = tokens.extend(
                prompt_ids=prompt_ids,
                output_ids=output_ids,
                history=history,
                replies=step.messages,
                tools=opened.tools,
            )
            history += step.messages
            if extension.replaces:
                prompt_ids = extension.token_ids
                self._recorder.begin(prompt_ids)
            else:
                prompt_ids = [*prompt_ids, *output_ids, *extension.token_ids]
                self._recorder.context(extension.token_ids)
        raise WireError(f"the gateway did not end the episode at its limit of {opened.limits.steps} steps")

    async def _sample(self, index: int, prompt_ids: list[int], opened: Opened, deadline: Deadline) -> Answer | None:
        """The policy's answer; ``None`` when there is no room or no time left for one."""
        room = self._room(prompt_ids, opened)
        if room <= 0 or deadline.expired():
            return None
        self._enter(Phase.ENGINE)
        answer = await sample_answer(
            self._side.engine,
            rid=f"{self.spec.id}.{index}",
            routing_key=self.spec.id,
            input_ids=prompt_ids,
            sampling=SamplingParams(
                max_new_tokens=min(self._step_tokens(opened), room),
                temperature=self.spec.temperature,
                stop_token_ids=self._side.tokens.stop_token_ids,
                sampling_seed=self.spec.sampling_seed(index),
            ),
            deadline=deadline,
        )
        self._recorder.sampled(answer.token_ids, answer.logprobs, answer.versions, index)
        return answer

    async def _step(
        self, index: int, prompt_ids: list[int], answer: Answer | None, opened: Opened, deadline: Deadline
    ) -> StepAnswer:
        truncated = answer is not None and answer.finish != "stop"
        message = AssistantMessage()
        if answer is not None:
            message = self._side.tokens.parse(
                answer.token_ids, prompt_ids=prompt_ids, tools=opened.tools, truncated=truncated
            )
        self._enter(Phase.STEP)
        step = await self._side.episodes.step(
            opened.handle,
            index,
            message,
            sampled_tokens=len(answer.token_ids) if answer else 0,
            truncated=truncated,
            limit=self._limit(prompt_ids, answer, message, opened),
            timeout=deadline.remaining() + opened.limits.verify_seconds,
        )
        self._note(index, step, step.message or message, answer)
        return step

    def _limit(self, prompt_ids: list[int], answer: Answer | None, message: AssistantMessage, opened: Opened) -> str:
        """The limit that ends the episode with this step; empty: none.

        A call that was cut off is answered, and the policy may try again. Plain text that was cut off is no final
        answer, so the episode ends as truncated rather than as completed.
        """
        room = self._room(prompt_ids, opened)
        if answer is None:
            return "context" if room <= 0 else "time"
        if answer.finish == "stop":
            return ""
        if answer.finish == "time":
            return "time"
        if len(answer.token_ids) >= room:
            return "context"
        return "tokens" if message.diagnosis is Diagnosis.NONE else ""

    def _room(self, prompt_ids: list[int], opened: Opened) -> int:
        served = self._side.context_tokens
        allowed = opened.limits.context_tokens if served is None else min(served, opened.limits.context_tokens)
        return allowed - len(prompt_ids)

    def _step_tokens(self, opened: Opened) -> int:
        asked = self.spec.max_tokens
        return opened.limits.tokens_per_step if asked is None else min(asked, opened.limits.tokens_per_step)

    def _note(self, index: int, step: StepAnswer, message: AssistantMessage, answer: Answer | None) -> None:
        record = StepRecord(
            index=index,
            message=Message(
                role="assistant",
                content=message.content,
                tool_calls=message.tool_calls,
                reasoning=message.reasoning,
            ),
            replies=step.messages,
            diagnosis=step.diagnosis,
            parts=step.parts,
            reward=step.reward,
            tool_errors=sum(result.status is not ToolStatus.OK for result in step.results),
            sampled_tokens=len(answer.token_ids) if answer else 0,
            engine_seconds=answer.seconds if answer else 0.0,
            environment_seconds=step.seconds,
        )
        self._steps.append(record)
        if self._on_step is not None:
            self._on_step(record)

    async def _close(self, handle: str, reason: str) -> None:
        """Best effort: a slot that cannot be closed is freed by its lease."""
        with contextlib.suppress(FarmError, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._side.episodes.close(handle, reason)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.since = time.monotonic()

    def _trajectory(self, outcome: Outcome) -> Trajectory:
        spec, opened = self.spec, self._opened
        steps = self._steps
        if not outcome.trainable:
            steps = [msgspec.structs.replace(step, reward=None) for step in steps]
        rewards = [step.reward for step in steps if step.reward is not None]
        return Trajectory(
            id=spec.id,
            run_id=spec.run_id,
            group_id=spec.group_id,
            group_size=spec.group_size,
            member=spec.member,
            attempt=spec.attempt,
            final=spec.last_attempt or outcome.kind is not OutcomeKind.INFRA_FAILED,
            purpose=spec.purpose,
            environment=opened.environment if opened else spec.environment,
            split=spec.split,
            task_id=spec.task.id,
            seed=spec.seed,
            policy=self._side.name,
            outcome=outcome,
            prompt=opened.messages if opened else (),
            segments=self._recorder.segments(),
            steps=tuple(steps),
            reward=sum(rewards) if rewards else None,
            catalogue=opened.catalogue if opened else "",
            isolation=opened.isolation if opened else Isolation.NONE,
            started_at=self._started_at,
            ended_at=time.time(),
            labels=spec.labels,
        )
