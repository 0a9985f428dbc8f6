"""Which Python runs inside the sandbox for a toolset."""

from __future__ import annotations

from envfarm.core.environment import Toolset
from sandboxes.isolation.bwrap import python


def interpreter(toolset: Toolset) -> str:
    """With an image its own ``python3``, found by its path; else the one that runs here.

    The image may be without one: then the command ends with status 127.
    """
    environment = getattr(toolset, "environment", None)
    return "python3" if environment is not None and environment.profile.image else python()
