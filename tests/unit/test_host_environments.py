"""An environment opens only in hosts of its image; every host describes it."""

import pytest

from envfarm.core.environment import Environment
from envfarm.core.sandbox import SandboxProfile
from sandboxes.host.environments import Loaded
from sandboxes.isolation.surroundings import Surroundings


class Imaged(Environment):
    """Wants an image."""

    profile = SandboxProfile(image="toolbox:1")


class Runs(Environment):
    """Runs code in the host's own system."""

    executes = True


class Plain(Environment):
    """Runs nothing."""


@pytest.mark.parametrize(
    ("cls", "image", "says"),
    [
        (Imaged, "", "asks for the image 'toolbox:1', and this host has no image"),
        (Imaged, "other:2", "asks for the image 'toolbox:1', and this host shows the image 'other:2'"),
        (Runs, "other:2", "asks for the host's own system, and this host shows the image 'other:2'"),
    ],
)
def test_in_a_host_of_another_image_it_is_described_and_says_why_it_does_not_open(cls, image, says):
    loaded = Loaded("e", cls, Surroundings(image=image))
    assert says in loaded.refusal
    assert loaded.info.profile == cls.profile


@pytest.mark.parametrize(("cls", "image"), [(Imaged, "toolbox:1"), (Plain, "other:2"), (Plain, "")])
def test_in_a_host_of_its_image_it_opens_and_one_that_runs_nothing_opens_anywhere(cls, image):
    assert Loaded("e", cls, Surroundings(image=image)).refusal == ""
