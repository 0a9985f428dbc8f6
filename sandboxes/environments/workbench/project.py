"""One task's project: the faulty program, tests that show the fault, and the cases that decide."""

from __future__ import annotations

import copy
from collections import Counter
from functools import lru_cache
from random import Random
from types import ModuleType
from typing import Any

import msgspec

from sandboxes.environments.workbench.families import FAMILIES, Family

SHOWN = 6
DECIDING = 24
_DRAWN = 1200
_LEAST_TELLING = 4  # deciding cases that the fault makes fail


class Case(msgspec.Struct, frozen=True):
    """A call and what it has to return, in terms of JSON."""

    function: str
    arguments: list[Any]
    result: Any


class Project(msgspec.Struct, frozen=True):
    """``source`` is the faulty program, ``right`` the one that stands behind ``deciding``."""

    family: str
    source: str
    right: str
    shown: tuple[Case, ...]
    deciding: tuple[Case, ...]

    @property
    def files(self) -> dict[str, bytes]:
        """What lies in the workspace at the beginning."""
        return {f"{self.family}.py": self.source.encode(), f"test_{self.family}.py": self._tests().encode()}

    def _tests(self) -> str:
        lines = [
            "import unittest",
            "",
            f"import {self.family}",
            "",
            "",
            f"class {_title(self.family)}Test(unittest.TestCase):",
        ]
        for number, case in enumerate(self.shown, 1):
            arguments = ", ".join(repr(argument) for argument in case.arguments)
            lines += [
                f"    def test_{case.function}_{number}(self):",
                f"        self.assertEqual({self.family}.{case.function}({arguments}), {case.result!r})",
                "",
            ]
        return "\n".join([*lines, "", 'if __name__ == "__main__":', "    unittest.main()", ""])


@lru_cache(maxsize=256)
def project(family_name: str, fault: int, seed: int) -> Project:
    """The project with fault number ``fault`` of a family; the same for the same seed on every machine."""
    family = FAMILIES[family_name]
    right = family.source
    worked_in = family.faults[fault]
    source = right.replace(worked_in.right, worked_in.wrong)
    draw = Random(seed)
    telling, others = _cases(family, loaded(right), loaded(source), draw)
    if len(telling) < _LEAST_TELLING + 1:
        raise AssertionError(f"fault {fault} of {family_name} shows in {len(telling)} of {_DRAWN} cases")
    few = min(3, len(telling) - _LEAST_TELLING)
    shown = _mixed(telling[:few], others[: SHOWN - few], draw)
    deciding = _mixed(telling[few:][: DECIDING // 2], _of_every_function(others[SHOWN:])[: DECIDING // 2], draw)
    return Project(family_name, source, right, shown, deciding)


def _cases(family: Family, right: ModuleType, faulty: ModuleType, draw: Random) -> tuple[list[Case], list[Case]]:
    """Different cases that the fault makes fail, and others."""
    found: dict[bytes, Case] = {}
    telling: list[Case] = []
    others: list[Case] = []
    functions = list(family.draws)
    for _ in range(_DRAWN):
        function = draw.choice(functions)
        arguments = family.draws[function](draw)
        case = Case(function, arguments, called(right, function, arguments))
        key = msgspec.json.encode((function, arguments))
        if key not in found:
            found[key] = case
            (others if _same(faulty, case) else telling).append(case)
    return telling, others


def called(module: ModuleType, function: str, arguments: list[Any]) -> Any:
    """What a function of trusted code returns, in terms of JSON."""
    value = getattr(module, function)(*copy.deepcopy(arguments))
    return msgspec.json.decode(msgspec.json.encode(value))


def _same(module: ModuleType, case: Case) -> bool:
    try:
        return bool(called(module, case.function, case.arguments) == case.result)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return False


def loaded(source: str) -> ModuleType:
    """A module from trusted source: that of this package, with a fault of this package."""
    module = ModuleType("program")
    exec(compile(source, "program.py", "exec"), module.__dict__)  # noqa: S102 - ours, and not what a model wrote
    return module


def _of_every_function(cases: list[Case]) -> list[Case]:
    """The first case of every function, then the second of each, and so on."""
    seen: Counter[str] = Counter()
    rounds: list[tuple[int, Case]] = []
    for case in cases:
        rounds.append((seen[case.function], case))
        seen[case.function] += 1
    return [case for _, case in sorted(rounds, key=lambda pair: pair[0])]


def _mixed(one: list[Case], other: list[Case], draw: Random) -> tuple[Case, ...]:
    cases = [*one, *other]
    draw.shuffle(cases)
    return tuple(cases)


def _title(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
