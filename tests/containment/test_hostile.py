"""Every hostile program fails in every way to confine it, soon, without a trace, and its neighbour works on."""

import os

import pytest

pytestmark = pytest.mark.containment
LIMIT = 2.0  # seconds
QUIET = 0.05  # seconds that a small command takes at most on a machine with nothing else to do
MEMORY_OF_HOST = 32 * 2**20  # bytes by which the host may grow, whatever a program writes
STALL = 1.0  # seconds; how much neighbours are slowed is a benchmark's matter, that they are not stopped is ours


def test_a_hostile_program_is_held(arena, attack):
    told = arena.fight(attack)
    assert "error" not in told, told["error"]
    assert told["breach"] == ""
    assert told["alive"], "the slot cannot be used any more"
    assert told["left"] == [], "processes are left"
    assert told["grown_bytes"] < MEMORY_OF_HOST
    assert told["kept"] < 3 * 16_384
    quiet = max(told["neighbour_before"]) < QUIET and max(told["neighbour_meanwhile"]) < 2 * QUIET
    assert told["seconds"] < (LIMIT if quiet else 2 * LIMIT)
    assert max(told["neighbour_meanwhile"]) < (STALL if quiet else 2 * STALL)


def test_an_arena_tells_what_bounds_commands_there(arena, way):
    from hostile import ATTACKS

    told = arena.fight(next(attack for attack in ATTACKS if attack.name == "privileges"))
    assert told["isolation"] == "bwrap"
    if way == "as we are":
        assert told["user"] == os.geteuid()
    elif way == "without control groups":
        assert told["controls"] == ["disk"]
    else:
        assert told["user"] != 0
        assert set(told["controls"]) <= ({"disk"} if "plain" not in way else set())
