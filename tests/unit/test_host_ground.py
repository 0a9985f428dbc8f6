"""Where no folder for workspaces can be made, the host says so in one line."""

import pytest

from envfarm.core.errors import SandboxError
from sandboxes.isolation import mounts


def test_a_ground_that_cannot_be_made_is_told_with_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(mounts, "_parent", lambda: tmp_path / "missing")
    with pytest.raises(SandboxError, match=r"missing.*make room in"):
        mounts.own_ground()
