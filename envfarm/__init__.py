"""envfarm: an agent-environment farm for tool-calling RL rollouts.

What environment authors need is here; everything else is imported from where it lives.
"""

from envfarm.core.environment import Environment, Toolset, tool
from envfarm.core.errors import ToolError
from envfarm.core.messages import Message
from envfarm.core.rewards import RewardSettings
from envfarm.core.sandbox import Isolation, SandboxProfile
from envfarm.core.task import Limits, Task

__all__ = [
    "Environment",
    "Isolation",
    "Limits",
    "Message",
    "RewardSettings",
    "SandboxProfile",
    "Task",
    "ToolError",
    "Toolset",
    "tool",
]
