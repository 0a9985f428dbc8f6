"""Holds a command at its start until it is in its control groups.

Joining a group waits for other processors (an RCU grace period, milliseconds on a busy machine); done from outside, it
takes place while bubblewrap builds the namespaces. Nothing of the command runs before: bubblewrap itself waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from envfarm.core.errors import SandboxError


class Gate:
    """Two pipes to bubblewrap: it tells the process that will become the command, and waits for a byte."""

    def __init__(self, join_files: Sequence[str]) -> None:
        self._join_files = join_files
        self._told, self._tell = os.pipe()
        self._wait, self._go = os.pipe()

    @property
    def words(self) -> list[str]:
        """Options for bubblewrap."""
        return ["--info-fd", str(self._tell), "--block-fd", str(self._wait)]

    @property
    def child_fds(self) -> tuple[int, int]:
        """Descriptors that bubblewrap must inherit."""
        return self._tell, self._wait

    def started(self) -> None:
        """The child has its ends (or will never be): close ours of them."""
        os.close(self._tell)
        os.close(self._wait)

    def drop(self) -> None:
        """There is no child: close the other ends too."""
        os.close(self._told)
        os.close(self._go)

    async def open(self) -> None:
        """Put the command into its groups and let it go. Raises :class:`SandboxError`; then it never runs."""
        await asyncio.to_thread(self._open)

    def _open(self) -> None:
        try:
            said = b""
            while not said.rstrip().endswith(b"}"):
                part = os.read(self._told, 4096)
                if not part:
                    return  # it failed to start, and its exit status tells
                said += part
            child = str(msgspec.json.decode(said)["child-pid"])
            for file in self._join_files:
                with contextlib.suppress(ProcessLookupError):
                    Path(file).write_text(child)
            with contextlib.suppress(BrokenPipeError):
                os.write(self._go, b"x")
        except (OSError, msgspec.DecodeError, KeyError) as error:
            raise SandboxError(f"a command could not be put into its control groups: {error}") from error
        finally:
            self.drop()
