"""The model of a small policy, and the loop that fits it to demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

import msgspec

from trainer_bridge.warmup_data import IGNORED, TrainingSequence, batches, collate

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONTEXT = 2048  # tokens
Report = Callable[[int, float], None]


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one phase. The learning rate rises over ``rise`` steps, stays, and falls over the last third.

    ``by_length``: batches of similar length, which wastes no work on padding. Not where length goes with what is
    demonstrated: when short cuts are short, every batch would teach only one or only the other.
    """

    steps: int
    learning_rate: float
    batch: int = 16
    rise: int = 20
    seed: int = 0
    weight_decay: float = 0.01
    max_norm: float = 1.0
    report_every: int = 50
    by_length: bool = True


def new_model(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A Qwen3-type causal LM of about 0.3 million parameters with random weights, in float32."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    end, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,  # named, because the default is 128 whatever the width
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.06,  # about 1 / sqrt(3 * hidden_size): the usual 0.02 starves so narrow a model
        eos_token_id=end,
        pad_token_id=padding,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=padding)  # type: ignore[no-untyped-call]
    return model


def fit(model: PreTrainedModel, sequences: Sequence[TrainingSequence], recipe: Recipe, report: Report) -> None:
    """Minimise the cross entropy of the learnt tokens with AdamW. ``report`` gets step and mean loss since the last."""
    import torch

    stream = batches(sequences, recipe.batch, Random(recipe.seed), by_length=recipe.by_length)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
    )
    padding = model.config.pad_token_id or 0
    model.train()
    losses: list[float] = []
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(step, recipe)
        loss = token_loss(model, *collate(next(stream), padding))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % recipe.report_every == 0 or step + 1 == recipe.steps:
            report(step + 1, sum(losses) / len(losses))
            losses.clear()
    model.train(mode=False)


def token_loss(model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over labelled positions; ``ids`` and ``labels`` are int64 (batch, length).

    Logits are computed for labelled positions only: most of a conversation is not the assistant's.
    """
    from torch.nn.functional import cross_entropy

    hidden = model.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    targets = labels[:, 1:]
    learnt = targets != IGNORED
    logits = model.get_output_embeddings()(hidden[learnt])  # type: ignore[no-untyped-call]
    return cross_entropy(logits, targets[learnt])


def _schedule(step: int, recipe: Recipe) -> float:
    rise = min(1.0, (step + 1) / recipe.rise)
    fall = min(1.0, 3.0 * (1.0 - step / recipe.steps) + 0.05)
    return rise * fall
