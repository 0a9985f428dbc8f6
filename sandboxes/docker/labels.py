"""What is written on a host's container, so that a later gateway finds its hosts again."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

import msgspec

from envfarm.core.sandbox import Isolation, SandboxProfile

OWNER, KIND, ID, STATE = "envfarm.owner", "envfarm.kind", "envfarm.id", "envfarm.state"
HOST_KIND, VOLUME_KIND, FILLER_KIND = "host", "image", "filler"
_RECORD = "envfarm.record"


def farm_version() -> str:
    """Of this farm: hosts of another one are not adopted."""
    return version("envfarm")


class HostRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One host. ``owner`` and ``state``: name and folder of the backend that made it; ``gateway``: which life of it.

    ``folder`` holds the socket; ``inside`` is what the host is in, ``lease`` in seconds.
    """

    id: str
    owner: str
    state: str
    gateway: str
    folder: str
    environments: tuple[str, ...]
    slots: int
    lease: float
    profile: SandboxProfile
    inside: Isolation
    version: str = msgspec.field(default_factory=farm_version)

    def labels(self) -> dict[str, str]:
        """The record, and what a person may want to filter by."""
        return {
            KIND: HOST_KIND,
            OWNER: self.owner,
            ID: self.id,
            "envfarm.gateway": self.gateway,
            "envfarm.version": self.version,
            "envfarm.lease": f"{self.lease:g}",
            "envfarm.slots": str(self.slots),
            "envfarm.environments": ",".join(self.environments),
            "envfarm.image": self.profile.image,
            _RECORD: msgspec.json.encode(self).decode(),
        }


def record_of(labels: Mapping[str, str]) -> HostRecord | None:
    """The record on a container; ``None`` when it has none that this version can read."""
    try:
        return msgspec.json.decode(labels.get(_RECORD, ""), type=HostRecord)
    except msgspec.DecodeError:
        return None
