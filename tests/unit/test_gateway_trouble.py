"""What keeps failing is left alone, and who loses hosts is found: by clocks that tests turn."""

import pytest

from envfarm.core.errors import Unavailable
from envfarm.core.sandbox import Isolation, SandboxProfile
from envfarm.gateway.blame import Blame
from envfarm.gateway.pool import combined
from envfarm.gateway.trouble import Trouble


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_each_failure_in_a_row_is_left_alone_twice_as_long_up_to_a_bound(clock):
    trouble = Trouble(1.0, 8.0, clock)
    waits = []
    for _ in range(6):
        trouble.failed("no")
        waits.append(trouble.left)
    for wait, most in zip(waits, (1, 2, 4, 8, 8, 8), strict=True):
        assert 0.75 * most <= wait <= most
    trouble.over()
    assert not trouble
    assert trouble.left == 0


def test_whoever_says_how_long_to_wait_is_heard(clock):
    trouble = Trouble(1.0, 8.0, clock)
    trouble.failed("429", 60.0)
    assert trouble.left == 60.0
    clock.now += 60
    assert trouble.left == 0
    assert trouble.cause == "429"


def lose(blame, number, **under_way):
    for name, count in under_way.items():
        for _ in range(count):
            blame.note(f"host-{number}", name, f"it ended with status {number}")


def test_an_environment_under_way_in_three_losses_within_a_minute_is_held_back_with_the_cause(clock):
    blame = Blame(clock)
    for number in range(2):
        lose(blame, number, bad=1)
        blame.check("bad")
    lose(blame, 2, bad=1)
    with pytest.raises(Unavailable, match=r"3 hosts were lost .* status 2") as refused:
        blame.check("bad")
    assert 20 <= refused.value.retry_after_s <= 30
    blame.check("good")
    clock.now += 31
    blame.check("bad")
    assert blame.suspended() == []


def test_losses_that_lie_far_apart_blame_nobody(clock):
    blame = Blame(clock)
    for number in range(9):
        lose(blame, number, bad=1)
        clock.now += 40
        blame.check("bad")


def test_a_busy_environment_is_not_blamed_for_what_a_rare_one_did(clock):
    blame = Blame(clock)
    for number in range(3):
        lose(blame, number, busy=50, bad=1)
    blame.check("busy")
    assert [held.environment for held in blame.suspended()] == ["bad"]


def test_when_the_wrong_one_was_held_back_the_next_losses_point_at_the_right_one(clock):
    blame = Blame(clock)
    for number in range(3):
        lose(blame, number, bad=5, innocent=1)
    assert [held.environment for held in blame.suspended()] == ["innocent"]
    for number in range(3, 6):
        lose(blame, number, bad=5)
    assert {held.environment for held in blame.suspended()} == {"innocent", "bad"}
    clock.now += 31
    assert blame.suspended() == []


def test_who_does_it_again_is_held_back_longer(clock):
    blame = Blame(clock)
    for number in range(6):
        if number == 3:
            assert blame.suspended()
            clock.now += 61
        lose(blame, number, bad=1)
    (held,) = blame.suspended()
    assert 45 <= held.retry_in_s <= 60


def test_a_pool_asks_for_what_the_most_demanding_environment_of_its_image_needs():
    small = SandboxProfile(image="i", isolation=Isolation.CONTAINER, memory_bytes=1, cpus=2.0)
    large = SandboxProfile(image="i", isolation=Isolation.CONTAINER, memory_bytes=9, network=True)
    both = combined("i", [small, large])
    assert (both.image, both.isolation, both.memory_bytes, both.cpus, both.network) == (
        "i",
        Isolation.CONTAINER,
        9,
        2.0,
        True,
    )
    mixed = combined("i", [small, SandboxProfile(image="i", isolation=Isolation.GVISOR)])
    assert mixed.isolation is Isolation.BWRAP
