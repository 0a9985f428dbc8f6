"""The isolation ladder: which level commands reach here, or what is missing for the one that was asked for."""

from __future__ import annotations

from envfarm.core.errors import IsolationError
from envfarm.core.sandbox import Isolation, SandboxProfile
from sandboxes.isolation.bwrap import require_bwrap
from sandboxes.isolation.gvisor import require_runsc, with_kernel
from sandboxes.isolation.surroundings import MACHINE, Surroundings


def reached(asked: Isolation, surroundings: Surroundings = MACHINE) -> Isolation:
    """The level that commands reach, which includes ``asked``.

    Raises :class:`IsolationError` that says what to install or to use instead.
    """
    if asked is Isolation.NONE:
        return Isolation.NONE  # the profile says so in as many words
    if asked is Isolation.GVISOR and surroundings.inside is Isolation.NONE:
        require_runsc()
        return Isolation.GVISOR
    level = Isolation.BWRAP if surroundings.inside is Isolation.NONE else surroundings.inside
    if not level.includes(asked):
        raise IsolationError(
            f"this host isolates with {level.value}, not {asked.value}: "
            "use a backend that offers it, or set the profile's isolation to bwrap"
        )
    require_bwrap()
    return level


def outside(profile: SandboxProfile) -> SandboxProfile:
    """What the machine must grant for commands of ``profile``: more than they get where each has its own kernel."""
    return with_kernel(profile) if profile.isolation is Isolation.GVISOR else profile
