"""Ways in which an inference engine fails its client, told apart because the remedies differ.

::

    EngineError
    ├── EngineUnreachable   nobody answered; another engine, or this one later, may
    ├── EngineRefused       the engine answered that it cannot do this; repeating it unchanged is of no use
    ├── EngineBusy          the engine's queue is full; later
    └── EngineTimeout       no answer within the budget (also a DeadlineExceeded)
"""

from __future__ import annotations

from envfarm.core.errors import DeadlineExceeded, EngineError


class EngineUnreachable(EngineError):
    """No connection, or it broke before the answer was complete."""

    code = "engine_unreachable"


class EngineRefused(EngineError):
    """The engine rejected the request or failed on it."""

    code = "engine_refused"


class EngineBusy(EngineError):
    """The engine's waiting queue is full."""

    code = "engine_busy"


class EngineTimeout(EngineError, DeadlineExceeded):
    """The budget ended before the answer came."""

    code = "engine_timeout"
