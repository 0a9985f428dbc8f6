"""What an episode asks of a policy's format: first prompt, what follows a turn, and the meaning of sampled ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from envfarm.core.messages import AssistantMessage, Message, ToolSchema


class Extension(msgspec.Struct, frozen=True):
    """Ids that follow the sampled ones, up to where the next answer begins; none of them was sampled.

    ``replaces``: the template rewrites what came before, so ``token_ids`` is a whole new prompt (a new segment).
    """

    token_ids: list[int]
    replaces: bool = False


class TokenBuilder(ABC):
    """The format of one policy. Pure: the same messages and ids give the same answer."""

    @property
    @abstractmethod
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant message."""

    @abstractmethod
    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Ids of the first prompt, up to where the first answer begins."""

    @abstractmethod
    def extend(
        self,
        *,
        prompt_ids: list[int],
        output_ids: list[int],
        history: Sequence[Message],
        replies: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> Extension:
        """What comes after ``prompt_ids + output_ids`` once ``replies`` were given.

        ``history`` are all messages before ``replies``, the assistant's (last) included. When ``output_ids`` does not
        end with a stop id, the missing end of turn is part of the extension.
        """

    @abstractmethod
    def parse(
        self, output_ids: list[int], *, prompt_ids: list[int], tools: Sequence[ToolSchema], truncated: bool
    ) -> AssistantMessage:
        """The assistant message that ``output_ids`` spell. Never raises on what a policy can sample."""
