"""Demonstrations as training sequences: JSON lines in, token ids and loss masks out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from envfarm.core.errors import ConfigError
from trainer_bridge.warmup_tokenizer import TURN_END, TURN_START

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # label of a position that carries no loss, as torch's cross entropy knows it


class Conversation(msgspec.Struct):
    """One line of a demonstrations file, in OpenAI's chat form."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """A rendered conversation: token ids, and for each whether the assistant has to produce it."""

    ids: list[int]
    learnt: list[bool]


def read_conversations(path: Path) -> list[Conversation]:
    """All conversations of a JSON lines file. Raises ``ConfigError`` naming the first bad line."""
    if not path.is_file():
        raise ConfigError(f"no demonstrations at {path}; expected a file of JSON lines with 'messages' and 'tools'")
    decoder = msgspec.json.Decoder(Conversation)
    conversations = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                conversations.append(decoder.decode(line))
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}, line {number}: {error}; expected {{'messages': [...]}}") from error
    if not conversations:
        raise ConfigError(f"{path} holds no conversation")
    return conversations


def render(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> str:
    """The conversation as the chat template writes it."""
    tools: list[Any] = list(conversation.tools)
    return str(tokenizer.apply_chat_template(conversation.messages, tools=tools or None, tokenize=False))


class Encoder:
    """Rendered ChatML conversations to token ids; the assistant's turns, end marks included, are to be learnt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._opening = tokenizer.encode(f"{TURN_START}assistant\n", add_special_tokens=False)
        self._end = tokenizer.convert_tokens_to_ids(TURN_END)

    def encode(self, rendered: str) -> TrainingSequence:
        """Ids of the whole text at once: what a conversation's pieces give when they are encoded one by one."""
        ids = self._tokenizer.encode(rendered, add_special_tokens=False)
        learnt = [False] * len(ids)
        position = 0
        while position < len(ids):
            after = position + len(self._opening)
            if ids[position:after] != self._opening:
                position += 1
                continue
            position = ids.index(self._end, after) + 1 if self._end in ids[after:] else len(ids)
            learnt[after:position] = [True] * (position - after)
        return TrainingSequence(ids, learnt)


def batches(
    sequences: Sequence[TrainingSequence], size: int, rng: Random, *, by_length: bool
) -> Iterator[list[TrainingSequence]]:
    """Endless batches in an order that ``rng`` draws anew for every pass; ``by_length``: each of similar lengths."""
    ordered = sorted(sequences, key=lambda sequence: len(sequence.ids)) if by_length else list(sequences)
    starts = list(range(0, len(ordered), size))
    while True:
        if not by_length:
            rng.shuffle(ordered)
        rng.shuffle(starts)
        for start in starts:
            yield ordered[start : start + size]


def collate(batch: Iterable[TrainingSequence], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ``ids`` and ``labels``, both int64 (batch, longest); labels are ``IGNORED`` outside what is learnt.

    Right padding needs no attention mask under causal attention: no real token sees a padded one.
    """
    import torch

    batch = list(batch)
    longest = max(len(sequence.ids) for sequence in batch)
    ids = torch.full((len(batch), longest), padding)
    labels = torch.full((len(batch), longest), IGNORED)
    for row, sequence in enumerate(batch):
        row_ids = torch.tensor(sequence.ids)
        ids[row, : len(row_ids)] = row_ids
        labels[row, : len(row_ids)] = torch.where(torch.tensor(sequence.learnt), row_ids, IGNORED)
    return ids, labels
