"""Programming at a workbench: find the fault of a small program and mend it, with Python and an editor."""

from __future__ import annotations

from sandboxes.environments.workbench.environment import Workbench

__all__ = ["Workbench"]
