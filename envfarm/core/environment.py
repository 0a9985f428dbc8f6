"""The class that users write, and the ``@tool`` mark on its methods.

An environment is trusted code that runs in a host. Any of its methods may be ``async``. Code that a *model* wrote
runs only through ``self.sandbox.exec(...)``.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar, overload

import msgspec

from envfarm.core.errors import ConfigError
from envfarm.core.messages import Message
from envfarm.core.rewards import RewardSettings
from envfarm.core.sandbox import Sandbox, SandboxProfile
from envfarm.core.task import Limits, Task

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound="Toolset")
MARK = "__envfarm_tool__"


class ToolMark(msgspec.Struct, frozen=True, kw_only=True):
    """What ``@tool`` notes on a function. The JSON schema is derived by ``envfarm.tools.schema``."""

    name: str
    ends: bool = False
    timeout_s: float | None = None


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(*, name: str | None = None, ends: bool = False, timeout_s: float | None = None) -> Callable[[F], F]: ...
def tool(
    function: F | None = None, /, *, name: str | None = None, ends: bool = False, timeout_s: float | None = None
) -> F | Callable[[F], F]:
    """Mark a method as a tool of its environment or toolset.

    ``ends``: the episode is over once it has been called. ``timeout_s``: instead of ``Limits.tool_seconds``.
    Name, description and schema come from the function's name, docstring and annotations.
    """

    def mark(f: F) -> F:
        setattr(f, MARK, ToolMark(name=name or f.__name__, ends=ends, timeout_s=timeout_s))
        return f

    return mark(function) if function is not None else mark


def marked_tools(owner: object) -> dict[str, tuple[Callable[..., Any], ToolMark]]:
    """Tools of an environment or toolset (instance or class) by name, in the order of definition, bases first.

    Raises :class:`ConfigError` when two of its methods have one name.
    """
    found: dict[str, tuple[Callable[..., Any], ToolMark]] = {}
    methods: dict[str, str] = {}
    cls = owner if isinstance(owner, type) else type(owner)
    for base in reversed(cls.__mro__):
        for attribute, value in vars(base).items():
            mark = getattr(value, MARK, None)
            if not isinstance(mark, ToolMark):
                continue
            if attribute not in vars(cls) and getattr(cls, attribute, None) is not value:
                continue  # overridden further down without the mark
            if methods.setdefault(mark.name, attribute) != attribute:
                raise ConfigError(
                    f"two tools of {cls.__name__} are named {mark.name!r}: the methods {methods[mark.name]} and "
                    f"{attribute}; rename one with @tool(name=...)"
                )
            found[mark.name] = (getattr(owner, attribute), mark)
    return found


class Toolset:
    """Ready-made tools that several environments share. One instance per slot.

    An environment declares ``toolsets = (Shell(), Files(max_lines=200))``. What stands there only says what to make:
    called, an instance makes another of its class with the arguments it was made with, and every slot uses one of its
    own, so that nothing is shared but those arguments, which a toolset must therefore leave as they are.
    ``sandbox`` and ``environment`` are set before first use. ``executes``: its tools run code through
    ``self.sandbox.exec``, so an episode opens only where that is isolated.
    """

    executes: ClassVar[bool] = False
    sandbox: Sandbox
    environment: Environment
    _made_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Note the arguments, whatever a subclass takes."""
        made = super().__new__(cls)
        made._made_with = (args, kwargs)
        return made

    def __init__(self) -> None:
        """Take no arguments; subclasses that do need not call this."""

    def __call__(self) -> Self:
        """Another instance of the same class, made with the same arguments."""
        args, kwargs = self._made_with
        return type(self)(*args, **kwargs)

    def reset(self) -> Awaitable[None] | None:
        """Forget everything of the episode before. Called ahead of the environment's own ``reset``."""


SignalFunction = Callable[["Environment"], "float | Awaitable[float | None] | None"]


class Environment:
    """A named, versioned family of tasks. Subclass it; one instance serves one episode at a time.

    Class attributes: ``name`` (default: the class name in snake case), ``version``, ``profile``, ``limits``,
    ``reward`` (weights and caps), ``system_prompt`` (put before the first message when not empty), ``toolsets``
    (instances or classes; each slot gets its own, see :class:`Toolset`), ``rewards`` (name → function of the
    environment after a step, for measures that only it can take) and ``executes`` (its own tools run code through
    ``self.sandbox.exec``, so an episode opens only where that is isolated).
    Before ``reset``, ``sandbox`` is set, and ``seed`` to the seed that all episodes of the group share.
    """

    name: ClassVar[str] = ""
    version: ClassVar[str] = "1"
    profile: ClassVar[SandboxProfile] = SandboxProfile()
    limits: ClassVar[Limits] = Limits()
    reward: ClassVar[RewardSettings] = RewardSettings(weights={"completion": 1.0})
    toolsets: ClassVar[Sequence[Callable[[], Toolset]]] = ()
    rewards: ClassVar[Mapping[str, SignalFunction]] = {}
    system_prompt: ClassVar[str] = ""
    executes: ClassVar[bool] = False

    sandbox: Sandbox
    seed: int = 0
    equipment: Sequence[Toolset] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = _snake(cls.__name__)
        if not isinstance(cls.limits, Limits):
            raise ConfigError(f"{cls.__name__}.limits must be a Limits(...), got {type(cls.limits).__name__}")

    @classmethod
    def configured(cls, parameter: str) -> type[Environment]:
        """The class behind the name ``NAME/parameter``; by default an environment takes no parameter."""
        raise ConfigError(f"environment {cls.name!r} takes no parameter, got {parameter!r}; use {cls.name!r}")

    def equip(self, sandbox: Sandbox) -> None:
        """Take ``sandbox`` and make the toolsets of this object. Called once, by the host, ahead of everything else."""
        self.sandbox = sandbox
        self.equipment = tuple(make() for make in self.toolsets)
        for toolset in self.equipment:
            toolset.sandbox = sandbox
            toolset.environment = self

    def toolset(self, kind: type[T]) -> T:
        """The toolset of class ``kind`` that this object uses, to fill it in ``reset`` or to look at it in ``verify``.

        Raises :class:`ConfigError` when ``toolsets`` names none.
        """
        for found in self.equipment:
            if isinstance(found, kind):
                return found
        raise ConfigError(f"{type(self).__name__} has no toolset {kind.__name__}; add it to its toolsets")

    def tasks(self, split: str) -> Iterable[Task]:
        """Tasks of ``split`` (``train``, ``validation``, ``test``), always in the same order; may be endless."""
        raise NotImplementedError(f"{type(self).__name__} must define tasks(split)")

    def reset(self, task: Task) -> str | Sequence[Message] | Awaitable[str | Sequence[Message]]:
        """Start ``task``; returns the first user message, or a list of messages. Default: the task's prompt."""
        return task.prompt

    def reply(self, message: str) -> str | Awaitable[str | None] | None:  # noqa: ARG002 - for subclasses
        """Simulated user's answer to a message without calls; ``None`` ends the episode."""
        return None

    def progress(self) -> float | Awaitable[float | None] | None:
        """Potential in [0, 1] of the present state: what the dense reward is the difference of."""
        return None

    def verify(self) -> float | Awaitable[float | None] | None:
        """Completion in [0, 1] at the end; ``None`` when it cannot be judged."""
        return None

    def close(self) -> Awaitable[None] | None:
        """Let go of what the episode held. Called after every episode, whatever its outcome."""


def description(environment: type[Environment]) -> str:
    """First paragraph of the docstring."""
    text = inspect.getdoc(environment) or ""
    return text.split("\n\n")[0].replace("\n", " ")


def _snake(name: str) -> str:
    out = [name[0].lower()]
    for before, char in itertools.pairwise(name):
        if char.isupper() and not before.isupper():
            out.append("_")
        out.append(char.lower())
    return "".join(out)
