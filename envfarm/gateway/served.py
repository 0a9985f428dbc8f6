"""What the gateway knows of one environment: its host's description, with the tools' schemas compiled."""

from __future__ import annotations

from envfarm.core.episode import EnvironmentInfo
from envfarm.core.task import Limits
from envfarm.tools.validation import Catalogue
from envfarm.wire.convert.episodes import info_from_pb
from envfarm.wire.v1 import types_pb2

ANSWER_SECONDS = 5.0
HANDLE_SLACK_SECONDS = 3600.0


class Served:
    """One environment, immutable. ``pb`` is the description as it goes over the wire.

    ``handle_seconds`` is the life of a handle: longer than any episode, so that only a lost one meets its end.
    """

    def __init__(self, pb: types_pb2.EnvironmentInfo) -> None:
        self.pb = pb
        self.info: EnvironmentInfo = info_from_pb(pb)
        self.limits: Limits = self.info.limits
        self.catalogue = Catalogue(self.info.tools)
        self.title = f"{self.info.name}@{self.info.version}"

        self.step_seconds = _step_seconds(self.info)
        self.handle_seconds = self.limits.seconds + HANDLE_SLACK_SECONDS


def _step_seconds(info: EnvironmentInfo) -> float:
    """Most wall seconds that a step can take by the environment's own limits."""
    limits = info.limits
    longest = max([limits.tool_seconds, *(tool.timeout_s for tool in info.tools if tool.timeout_s is not None)])
    return min(limits.seconds, limits.calls_per_step * longest + limits.verify_seconds) + ANSWER_SECONDS
