"""Whether a program does what it should: it is run in the sandbox, and judged outside.

Into the sandbox go the calls to make; out of it come the values they returned. What they should have returned never
leaves the host. A program can therefore end early, patch whatever it likes, print, or write over tests, and earns
nothing by it: only the right values count, and there is no way to them but to compute them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from envfarm.core.sandbox import Sandbox
from sandboxes.environments.workbench.project import Case
from sandboxes.isolation.bwrap import python

SECONDS = 5.0
# Values go out through a descriptor of their own, so that what a program prints is not in their way.
_CALLER = """
import json, os, sys
asked = json.load(sys.stdin)
answer = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
sys.path.insert(0, os.getcwd())
program = __import__(asked["module"])
for function, arguments in asked["calls"]:
    try:
        value = [getattr(program, function)(*arguments)]
        line = json.dumps(value)
    except Exception:
        line = "[]"
    print(line, file=answer)
answer.close()
os._exit(0)
"""


async def share_right(sandbox: Sandbox, module: str, cases: Sequence[Case]) -> float:
    """Share of ``cases``, in [0, 1], in which the program in the workspace returns what it should.

    Raises ``SandboxError`` when the sandbox fails; a program that fails is wrong, not an error.
    """
    asked = {"module": module, "calls": [(case.function, case.arguments) for case in cases]}
    argv = [python(), "-I", "-B", "-X", "utf8", "-c", _CALLER]
    result = await sandbox.exec(argv, stdin=msgspec.json.encode(asked), seconds=SECONDS)
    lines = result.stdout.split(b"\n")[: len(cases)]
    return sum(_right(line, case) for line, case in zip(lines, cases, strict=False)) / len(cases)


def _right(line: bytes, case: Case) -> bool:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return isinstance(value, list) and len(value) == 1 and _equal(value[0], case.result)


def _equal(value: Any, expected: Any) -> bool:
    """Equal, and of one kind: to JSON ``True`` is not 1, and ``1.0`` is not 1."""
    if isinstance(expected, list):
        return isinstance(value, list) and len(value) == len(expected) and all(map(_equal, value, expected))
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(_equal(value[k], expected[k]) for k in value)
        )
    return type(value) is type(expected) and bool(value == expected)
