"""The errors that the farm raises, one class per boundary that can break.

::

    FarmError
    ├── ConfigError            what the user wrote: flags, files, names, values
    ├── PolicyError            the policy's own fault (never an exception on an episode's way: an observation)
    ├── ToolError              a tool answered that it cannot do what was asked; the model sees the text
    ├── EnvironmentCodeError   environment code broke: reset, verify, progress, tasks
    ├── SandboxError           a host, its slot or its isolation
    │   ├── IsolationError     the isolation level asked for cannot be had here
    │   └── SlotLost           the slot of this episode is gone (host died, lease expired, recycled)
    ├── ProviderError          a remote tool provider
    ├── EngineError            the inference engine
    │   └── EngineAborted      the request was aborted; partial tokens are kept
    ├── LogError               the trajectory log
    │   ├── LogFull            the disk or the quota under it is full
    │   └── CorruptRecord      a record failed its checksum or its schema
    ├── WireError              gRPC transport, after retries
    │   ├── Unavailable        nobody answers; try again later
    │   └── Rejected           the other side refused: auth, quota, admission
    ├── StepConflict           same step index, another action
    └── DeadlineExceeded       the budget of this operation is used up

Packages add narrower classes below these where the remedies differ (``envfarm.inference.errors`` draws its own).
A bad rollout is data, not a crash: only code outside an episode's way lets these reach a person, and then the
message names the thing, the expectation and the remedy.
"""

from __future__ import annotations


class FarmError(Exception):
    """Base of all errors of the farm. ``str()`` is fit for a person: what, expected, remedy."""

    code = "farm_error"


class ConfigError(FarmError):
    """The user asked for something that does not exist or does not fit."""

    code = "config"


class PolicyError(FarmError):
    """The policy did something that ends its episode; becomes ``policy_failed(reason)``."""

    code = "policy"


class ToolError(FarmError):
    """Raised by a tool to tell the model that a call cannot be served. The text becomes the tool's result."""

    code = "tool"


class EnvironmentCodeError(FarmError):
    """Environment code raised, hung, or returned something it must not."""

    code = "environment"


class SandboxError(FarmError):
    """A sandbox host or one of its slots failed."""

    code = "sandbox"


class IsolationError(SandboxError):
    """The isolation level that the profile names cannot be had on this machine."""

    code = "isolation"


class SlotLost(SandboxError):
    """The slot behind an episode is gone; the attempt ends as ``infra_failed``."""

    code = "slot_lost"


class ProviderError(FarmError):
    """A remote tool provider failed or left."""

    code = "provider"


class EngineError(FarmError):
    """The inference engine failed to answer."""

    code = "engine"


class EngineAborted(EngineError):
    """The engine gave the request up because it was told to."""

    code = "engine_aborted"


class LogError(FarmError):
    """The trajectory log could not do what was asked; nothing was acknowledged."""

    code = "log"


class LogFull(LogError):
    """No room under the log. Nothing was acknowledged; free space and send again."""

    code = "log_full"


class CorruptRecord(LogError):
    """A stored record does not match its checksum or schema."""

    code = "corrupt_record"


class WireError(FarmError):
    """A call over the network failed after its retries."""

    code = "wire"


class Unavailable(WireError):
    """The other side cannot be reached, is full or is draining; the same call may go through later.

    ``retry_after_s`` is the other side's hint in seconds, if it gave one.
    """

    code = "unavailable"
    retry_after_s: float | None = None


class Rejected(WireError):
    """The other side refused the call; repeating it unchanged is of no use."""

    code = "rejected"


class StepConflict(FarmError):
    """A step index was used again with another action. Maps to gRPC ``ABORTED``."""

    code = "step_conflict"


class DeadlineExceeded(FarmError):
    """The time budget passed down to this operation is used up."""

    code = "deadline"
