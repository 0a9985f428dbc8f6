"""What a worker reports: counts and means since the last report, under the names that curves are drawn by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from envfarm.core.messages import Diagnosis
from envfarm.core.outcome import OutcomeKind
from envfarm.core.run import MetricPoint
from envfarm.core.trajectory import StepRecord, Trajectory

_MALFORMED = (Diagnosis.SYNTAX, Diagnosis.TRUNCATED, Diagnosis.UNKNOWN_TOOL, Diagnosis.SCHEMA)


def part_sums(trajectory: Trajectory) -> dict[str, float | None]:
    """Sum over steps of every reward part; ``None`` when it was never measured."""
    sums: dict[str, float | None] = {}
    for step in trajectory.steps:
        for name, value in step.parts.items():
            before = sums.get(name)
            sums[name] = before if value is None else value + (before or 0.0)
    return sums


def completion(trajectory: Trajectory) -> float | None:
    """The ``completion`` part of the step that ended the episode; ``None``: not measured."""
    return trajectory.steps[-1].parts.get("completion") if trajectory.steps else None


def mean(values: Iterable[float | None]) -> float | None:
    """Arithmetic mean of what was measured; ``None`` when nothing was."""
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


class Meter:
    """Takes steps and trajectories as they come; :meth:`take` gives what happened since it was last called."""

    def __init__(self, now: float) -> None:
        self.episodes = 0
        self.infra_failed = 0
        self.version = 0
        self._since = now
        self._reset()

    def _reset(self) -> None:
        self._steps = 0
        self._tokens = 0
        self._malformed = 0
        self._success: list[float | None] = []
        self._reward: list[float | None] = []
        self._lengths: list[float] = []
        self._parts: defaultdict[str, list[float | None]] = defaultdict(list)

    def step(self, step: StepRecord) -> None:
        """Note a step."""
        self._steps += 1
        self._tokens += step.sampled_tokens
        self._malformed += step.diagnosis in _MALFORMED

    def trajectory(self, trajectory: Trajectory) -> None:
        """Note an attempt that ended. Only trainable ones enter means."""
        self.infra_failed += trajectory.outcome.kind is OutcomeKind.INFRA_FAILED
        self.episodes += trajectory.final
        self.version = max(self.version, trajectory.oldest_version or 0)
        if not trajectory.outcome.trainable:
            return
        self._lengths.append(len(trajectory.steps))
        self._success.append(completion(trajectory))
        self._reward.append(trajectory.reward)
        for name, value in part_sums(trajectory).items():
            self._parts[name].append(value)

    def take(self, now: float) -> dict[str, float]:
        """Series and values since the last call, at monotonic second ``now``. What was not measured is absent."""
        seconds = max(now - self._since, 1e-9)
        values: dict[str, float | None] = {
            "rollout/episodes": self.episodes,
            "rollout/infra_failed": self.infra_failed,
            "rollout/steps_per_s": self._steps / seconds,
            "rollout/tokens_per_s": self._tokens / seconds,
            "rollout/success": mean(self._success),
            "rollout/reward": mean(self._reward),
            "rollout/steps_per_episode": mean(self._lengths),
            "rollout/format_errors": self._malformed / self._steps if self._steps else None,
            **{f"reward/{name}": mean(found) for name, found in self._parts.items()},
        }
        self._since = now
        self._reset()
        return {name: float(value) for name, value in values.items() if value is not None}


def points(values: Mapping[str, float], *, step: int, at: float, source: str) -> list[MetricPoint]:
    """One point per series."""
    return [MetricPoint(name=name, step=step, value=value, at=at, source=source) for name, value in values.items()]
