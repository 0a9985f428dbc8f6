"""What confines is tried out: what it says when it does not work stands in the error, with what it needs."""

import pytest

from envfarm.core.errors import IsolationError
from sandboxes.isolation.probe import require_working

WORDS = {"status": 7, "needs": "rights", "install": "install it"}


def test_the_status_that_is_expected_is_enough():
    require_working("/bin/sh", ["/bin/sh", "-c", "exit 7"], **WORDS)


def test_another_status_is_told_with_what_was_said_and_is_needed():
    with pytest.raises(IsolationError, match=r"^/bin/sh does not work here \(no leave\); it needs rights$"):
        require_working("/bin/sh", ["/bin/sh", "-c", "echo no leave >&2; exit 1"], **WORDS)
    with pytest.raises(IsolationError, match=r"\(status 3\)"):
        require_working("/bin/sh", ["/bin/sh", "-c", "exit 3"], **WORDS)


def test_a_program_that_cannot_be_started_is_told_with_how_to_install_it():
    with pytest.raises(IsolationError, match=r"install it$"):
        require_working("/nowhere", ["/nowhere"], **WORDS)
