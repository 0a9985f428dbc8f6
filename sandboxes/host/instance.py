"""One environment with its toolsets, made for one slot and used for one episode after another."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from envfarm.core.environment import ToolMark
from envfarm.core.errors import EnvironmentCodeError, FarmError
from envfarm.core.messages import Message
from envfarm.tools.schema import functions
from sandboxes.host.environments import Loaded
from sandboxes.host.results import exception_text
from sandboxes.host.runner import CallOverdue, Job, Steps
from sandboxes.isolation.sandbox import SlotSandbox

log = logging.getLogger(__name__)
_TRACEBACKS_PER_PLACE = 5
_shown: Counter[str] = Counter()


class Instance:
    """An environment object, its toolsets and its tools by name. Made on a runner thread: user code runs here."""

    def __init__(self, loaded: Loaded, sandbox: SlotSandbox) -> None:
        self.loaded = loaded
        self.sandbox = sandbox
        self.environment = loaded.cls()
        self.environment.equip(sandbox)
        self.toolsets = self.environment.equipment
        self.tools: dict[str, tuple[Callable[..., Any], ToolMark]] = functions(self.environment, self.toolsets)


def ask(job: Job, name: str, what: str, function: Callable[..., Any], seconds: float, *args: Any) -> Steps:
    """Call a method of environment ``name`` itself; whatever goes wrong becomes an :class:`EnvironmentCodeError`."""
    try:
        return (yield from job.invoke(function, seconds, *args))
    except CallOverdue:
        raise hung(name, what, seconds) from None
    except FarmError:
        raise  # names its cause already: a missing package, an isolation that cannot be had
    except Exception as error:  # user code
        show_traceback(name, what)
        raise EnvironmentCodeError(f"environment {name!r}: {what} raised {exception_text(error)}") from error


def hung(name: str, what: str, seconds: float) -> EnvironmentCodeError:
    """The error for a method that did not come back."""
    return EnvironmentCodeError(f"environment {name!r}: {what} took longer than its {seconds:.3g} s")


def show_traceback(name: str, what: str) -> None:
    """Log the exception being handled for the environment's author, the first few times."""
    place = f"environment {name!r}: {what}"
    _shown[place] += 1
    if _shown[place] <= _TRACEBACKS_PER_PLACE:
        log.warning("%s raised", place, exc_info=True)


def as_messages(name: str, system_prompt: str, first: Any) -> list[Message]:
    """The first messages of an episode from what ``reset`` returned."""
    messages = [Message(role="system", content=system_prompt)] if system_prompt else []
    if isinstance(first, str):
        return [*messages, Message(role="user", content=first)]
    if isinstance(first, Sequence) and all(isinstance(m, Message) for m in first) and first:
        return [*([] if first[0].role == "system" else messages), *first]
    raise EnvironmentCodeError(
        f"environment {name!r}: reset returned {_kind(first)}; expected a str or a list of Message"
    )


def as_unit(name: str, what: str, value: Any) -> float | None:
    """A measure in [0, 1], or ``None``."""
    number = as_number(name, what, value)
    if number is not None and not 0.0 <= number <= 1.0:
        raise EnvironmentCodeError(f"environment {name!r}: {what} returned {number:g}, expected 0 to 1 or None")
    return number


def as_number(name: str, what: str, value: Any) -> float | None:
    """A finite number, or ``None``. Numpy scalars and booleans count as numbers."""
    if value is None or (type(value) is float and math.isfinite(value)):
        return value
    try:
        number = float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise EnvironmentCodeError(f"environment {name!r}: {what} returned {_kind(value)}, expected a number or None")
    return number


def _kind(value: Any) -> str:
    kind = type(value).__name__
    shown = repr(value)[:60] if isinstance(value, msgspec.Struct | int | float | str) else ""
    return f"{kind} {shown}".strip()
