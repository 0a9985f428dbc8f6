"""How an environment declares toolsets, and that no two slots share one."""

from __future__ import annotations

import functools

import pytest

from envfarm.core.environment import Environment, Toolset, tool
from envfarm.core.errors import ConfigError
from envfarm.tools.schema import schemas
from sandboxes.host.environments import Loaded
from sandboxes.isolation.sandbox import slot_sandbox


class Notes(Toolset):
    """Keeps what it is told."""

    def __init__(self, title: str = "notes", *, most: int = 3) -> None:
        self.title = title
        self.most = most
        self.kept: list[str] = []

    @tool
    def note(self, text: str) -> int:
        """Keep a note."""
        self.kept.append(text)
        return len(self.kept)


class Bell(Toolset):
    """Takes no arguments."""

    executes = True

    @tool
    def ring(self) -> str:
        """Ring."""
        return "ding"


class Desk(Environment):
    """An environment with toolsets of every kind of declaration."""

    toolsets = (Notes("desk", most=5), Bell)


def test_an_instance_makes_its_like_with_the_same_arguments_and_state_of_its_own():
    declared = Notes("a", most=7)
    declared.note("of the one that is only declared")
    made = declared()
    assert (made.title, made.most, made.kept) == ("a", 7, [])
    assert type(made()) is Notes
    assert made().most == 7


def test_an_argument_that_a_toolset_does_not_take_is_refused_where_it_is_declared():
    with pytest.raises(TypeError):
        Bell("loud")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Notes(most=1, least=0)  # type: ignore[call-arg]


@pytest.mark.parametrize("declared", [Notes("desk"), Notes, functools.partial(Notes, "desk"), lambda: Notes("desk")])
def test_instances_classes_and_functions_may_be_declared(declared):
    class Office(Environment):
        """Declares one toolset."""

        toolsets = (declared,)

    assert [schema.name for schema in schemas(Office)] == ["note"]
    office = Office()
    office.equip(None)  # type: ignore[arg-type]
    assert office.toolset(Notes).kept == []


def test_two_slots_share_no_toolset(tmp_path):
    slots = [Desk(), Desk()]
    for index, environment in enumerate(slots):
        environment.equip(slot_sandbox(tmp_path, index, Desk.profile))
    slots[0].toolset(Notes).note("mine")
    assert slots[1].toolset(Notes).kept == []
    assert slots[1].toolset(Notes).environment is slots[1]
    assert slots[1].toolset(Notes).sandbox is slots[1].sandbox


def test_an_environment_says_which_toolset_it_lacks():
    with pytest.raises(ConfigError, match="Desk has no toolset Other; add it to its toolsets"):
        Desk().toolset(type("Other", (Toolset,), {}))


@pytest.mark.parametrize("declared", [Bell(), Bell, functools.partial(Bell), lambda: Bell()])  # noqa: PLW0108
def test_a_toolset_that_runs_code_makes_its_environment_one_that_does(declared):
    class Tower(Environment):
        """Declares one toolset that runs code."""

        toolsets = (declared,)

    assert Loaded("tower", Tower).executes
