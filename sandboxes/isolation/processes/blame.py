"""Whose doing it is that a command could not be set up: the slot's own, or this host's. Pure.

What earlier commands of an episode did to their own processes and files is theirs. If it counted as a failure of the
host, a policy could have an episode that it is about to lose counted as no episode.
"""

from __future__ import annotations

_TOO_MANY = b"Resource temporarily unavailable"
_NO_ENTRY = b"bwrap: Can't chdir to "
_SHUT = b"Permission denied"


def own_doing(said: bytes, *, crowded: bool, layered: bool) -> bool:
    """Whether commands of the slot are behind what bubblewrap ``said`` before it gave up.

    ``crowded``: others of them ran at that time, so that all processes may have been used up by them. ``layered``:
    they can remove any folder, the one that commands begin in included, which was there when the episode began.
    """
    if crowded and _TOO_MANY in said:
        return True
    return said.startswith(_NO_ENTRY) and (layered or _SHUT in said)
