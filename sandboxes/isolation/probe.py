"""Whether what confines works on this machine: tried out once, before anything is entrusted to it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from envfarm.core.errors import IsolationError

_SECONDS = 20.0


def require_working(
    path: str, argv: Sequence[str], *, status: int, needs: str, install: str, fds: Sequence[int] = ()
) -> None:
    """Run ``argv``, which has to end with ``status`` within twenty seconds; ``fds`` are descriptors that it inherits.

    Raises :class:`IsolationError` that names ``path``, what it said, and what it ``needs`` or how to ``install`` it.
    """
    try:
        tried = subprocess.run(  # noqa: S603 - ours
            argv, capture_output=True, timeout=_SECONDS, check=False, stdin=subprocess.DEVNULL, pass_fds=fds
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise IsolationError(f"{path} does not work here: {error}; {install}") from error
    if tried.returncode != status:
        said = tried.stderr.decode(errors="replace").strip() or f"status {tried.returncode}"
        raise IsolationError(f"{path} does not work here ({said}); it needs {needs}")
