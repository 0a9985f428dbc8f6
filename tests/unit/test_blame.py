"""Whose doing it is that a command could not be set up."""

import pytest

from sandboxes.isolation.processes.blame import own_doing

FORK = b"bwrap: Can't fork for pid 1: Resource temporarily unavailable\n"
SHUT = b"bwrap: Can't chdir to /workspace: Permission denied\n"
GONE = b"bwrap: Can't chdir to /app: No such file or directory\n"
ROOM = b"bwrap: Can't mount tmpfs on /newroot: Cannot allocate memory\n"


@pytest.mark.parametrize(
    ("said", "crowded", "layered", "own"),
    [
        (FORK, True, False, True),
        (FORK, False, False, False),  # nobody else of the slot ran: the machine is full
        (SHUT, False, False, True),
        (GONE, False, True, True),
        (GONE, False, False, False),  # it never was there
        (ROOM, True, True, False),
        (b"", True, True, False),
    ],
)
def test_only_what_commands_of_the_slot_can_have_done_is_theirs(said, crowded, layered, own):
    assert own_doing(said, crowded=crowded, layered=layered) is own
