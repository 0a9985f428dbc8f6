"""One slot: room for one episode, with what is kept there from one episode to the next."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from envfarm.core.errors import FarmError
from sandboxes.host.environments import Loaded
from sandboxes.host.instance import Instance
from sandboxes.isolation.files.snapshots import SnapshotStore
from sandboxes.isolation.files.workspace import Workspace
from sandboxes.isolation.sandbox import SlotSandbox
from sandboxes.isolation.surroundings import MACHINE, Surroundings
from sandboxes.isolation.user import sandbox_user

log = logging.getLogger(__name__)


class Slot:
    """Instances and sandboxes are kept by environment and used again."""

    def __init__(
        self, index: int, ground: Path, surroundings: Surroundings = MACHINE, snapshots: SnapshotStore | None = None
    ) -> None:
        self.index = index
        self._surroundings = surroundings
        self._user = sandbox_user(index)
        self.workspace = Workspace(ground / f"slot-{index}", self._user, surroundings, snapshots)
        self.instances: dict[str, Instance] = {}
        self._sandboxes: dict[str, SlotSandbox] = {}
        self.ready_for = ""  # name of the environment for which it is prepared ahead
        self.stuck: list[threading.Thread] = []  # inside calls that had to be given up

    def sandbox(self, loaded: Loaded) -> SlotSandbox:
        """What environment code of ``loaded`` sees in this slot."""
        found = self._sandboxes.get(loaded.name)
        if found is None:
            name = f"{self.index}-{len(self._sandboxes)}"
            found = self._sandboxes[loaded.name] = SlotSandbox(
                name, self.workspace, loaded.cls.profile, self._user, self._surroundings
            )
        return found

    def hangs(self) -> bool:
        """Whether a call that was given up still runs in here."""
        self.stuck = [thread for thread in self.stuck if thread.is_alive()]
        return bool(self.stuck)

    def close(self) -> None:
        """Let go of everything."""
        for sandbox in self._sandboxes.values():
            try:
                sandbox.close()
            except FarmError as error:
                log.warning("slot %d: %s", self.index, error)
