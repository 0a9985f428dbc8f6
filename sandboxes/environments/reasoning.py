"""Tasks of the package ``reasoning-gym`` (over a hundred procedural data sets with verifiers) with tools to solve them.

``reasoning_gym`` is a mix; ``reasoning_gym/NAME`` or ``reasoning_gym/NAME,NAME`` is what you choose. An entry follows
from data set, seed and index alone, so a task carries only those and the host makes the entry again.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, ClassVar

import msgspec

from envfarm.core.environment import Environment, tool
from envfarm.core.errors import ConfigError
from envfarm.core.rewards import RewardSettings
from envfarm.core.suggestions import did_you_mean
from envfarm.core.task import Limits, Task
from sandboxes.tools.calculator import Calculator
from sandboxes.tools.python import Python

log = logging.getLogger(__name__)
MIX = (
    "chain_sum",
    "basic_arithmetic",
    "gcd",
    "lcm",
    "leg_counting",
    "letter_counting",
    "base_conversion",
    "count_bits",
)
FINITE_SIZE = 240  # tasks in ``validation`` and in ``test``
BLOCK = 1000  # entries that one data set object makes
# The package seeds entry i with seed + i: splits lie too far apart to meet.
SPLIT_SEEDS = {"train": 0, "validation": 1_500_000_000, "test": 3_000_000_000}


class Entry(msgspec.Struct, frozen=True):
    """Where an entry comes from."""

    dataset: str
    seed: int
    index: int


class ReasoningGym(Environment):
    """Solve a reasoning task, with a calculator and Python, and give the answer."""

    name = "reasoning_gym"
    version = "1"
    system_prompt = "Solve the task. Use the tools if they help, then call `answer` once with the final answer only."
    limits = Limits(steps=6, seconds=300.0, tokens_per_step=512, context_tokens=4096)
    reward = RewardSettings(weights={"completion": 1.0, "format": 0.1})
    toolsets = (Calculator, Python)
    datasets: ClassVar[tuple[str, ...]] = MIX

    @classmethod
    def configured(cls, parameter: str) -> type[Environment]:
        """The environment over the data sets that ``parameter`` names, separated by commas."""
        names = tuple(name.strip() for name in parameter.split(",") if name.strip())
        known = _datasets()
        for name in names or ("",):
            if name not in known:
                hint = did_you_mean(name, known) or f" (there is: {', '.join(sorted(known))})"
                raise ConfigError(f"reasoning-gym has no data set {name!r}{hint}")
        return type(
            cls.__name__, (cls,), {"name": f"{cls.name}/{parameter}", "datasets": names, "__doc__": cls.__doc__}
        )

    def tasks(self, split: str) -> Iterable[Task]:
        """The data sets in turn; ``train`` never ends."""
        if split not in SPLIT_SEEDS:
            raise ConfigError(f"{self.name} has no split {split!r} (there is: {', '.join(SPLIT_SEEDS)})")
        _library()
        numbers = itertools.count() if split == "train" else range(FINITE_SIZE)
        return (self._task(split, number) for number in numbers)

    def _task(self, split: str, number: int) -> Task:
        round_, which = divmod(number, len(self.datasets))
        block, index = divmod(round_, BLOCK)
        entry = Entry(self.datasets[which], SPLIT_SEEDS[split] + block * BLOCK, index)
        question = _entry(entry)["question"]
        return Task(
            id=f"{entry.dataset}-{round_}", prompt=question, seed=entry.seed + index, data=msgspec.to_builtins(entry)
        )

    def reset(self, task: Task) -> str:
        """Make the entry again and ask its question."""
        self._source = msgspec.convert(task.data, Entry)
        self._entry = _entry(self._source)
        self._answer: str | None = None
        return str(self._entry["question"])

    @tool(ends=True)
    def answer(self, value: str) -> str:
        """Give the final answer, in the form that the task asks for.

        Args:
            value: The answer alone, without explanation.
        """
        self._answer = value
        return "noted"

    def reply(self, message: str) -> None:
        """A message without calls ends the episode: its answer stands in ``<answer>`` tags, or in its last line.

        Instruct models that know no tools answer in plain words; the data sets' scorers give part of the credit for an
        answer among other words.
        """
        tagged = _library().utils.extract_answer(message)
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        self._answer = tagged if tagged is not None else (lines[-1] if lines else None)

    def verify(self) -> float | None:
        """The data set's own score of the answer, 0 to 1; without an answer 0."""
        if self._answer is None:
            return 0.0
        try:
            score = _dataset(self._source.dataset, self._source.seed).score_answer(self._answer, self._entry)
        except Exception:  # a scorer that chokes on what a model wrote: the answer is wrong, nothing is broken
            log.info("data set %s cannot score %.80r", self._source.dataset, self._answer, exc_info=True)
            return 0.0
        return min(1.0, max(0.0, float(score)))


def _library() -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.utils
    except ImportError as error:
        raise ConfigError(
            f"environment reasoning_gym needs the package reasoning-gym ({error}): pip install 'envfarm[sandbox]'"
        ) from error
    return reasoning_gym


def _datasets() -> Any:
    _library()
    from reasoning_gym.factory import DATASETS

    return DATASETS


@lru_cache(maxsize=64)
def _dataset(name: str, seed: int) -> Any:
    try:
        return _library().create_dataset(name, seed=seed, size=BLOCK)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym's data set {name!r} cannot be made without settings: {error}") from error


def _entry(source: Entry) -> Any:
    return _dataset(source.dataset, source.seed)[source.index]
