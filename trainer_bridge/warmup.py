"""``envfarm warmup``: fit a causal language model to demonstrations, from scratch or from a Hugging Face folder.

Reinforcement learning sharpens what a policy sometimes does; it does not teach what it never does. The warm-up gives
it the skill to start from. It knows nothing of environments: demonstrations are files.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from envfarm.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from trainer_bridge.warmup_data import Conversation


def warmup(
    demonstrations: Annotated[Path, typer.Argument(help="JSON lines with 'messages' and 'tools' (OpenAI's form).")],
    out: Annotated[Path, typer.Option(help="Folder to write the policy to.")],
    policy: Annotated[Path | None, typer.Option(help="Hugging Face folder to start from; none: from scratch.")] = None,
    steps: Annotated[int, typer.Option(help="Optimiser steps.", min=1)] = 1400,
    batch: Annotated[int, typer.Option(help="Conversations per step.", min=1)] = 16,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate of AdamW.", min=0.0)] = 2e-3,
    by_length: Annotated[
        bool, typer.Option(help="Batches of similar length; not if length tells what is shown.")
    ] = True,
    vocabulary: Annotated[int, typer.Option(help="Tokenizer entries, when made from scratch.", min=300)] = 448,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of batches.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0: as many as torch likes.", min=0)] = 0,
) -> None:
    """Supervised warm-up of a policy on demonstrations (loss on the assistant's tokens only)."""
    import torch
    import transformers

    from trainer_bridge.warmup_data import Encoder, read_conversations, render
    from trainer_bridge.warmup_training import Recipe, fit

    started = time.monotonic()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    conversations = read_conversations(demonstrations)
    tokenizer, model = _load(policy) if policy else _make(conversations, vocabulary)
    encoder = Encoder(tokenizer)
    sequences = [encoder.encode(render(tokenizer, conversation)) for conversation in conversations]
    learnt = sum(sum(sequence.learnt) for sequence in sequences)
    if not learnt:
        raise ConfigError(f"{demonstrations}: no assistant turn in the chat template's output (ChatML is expected)")
    typer.echo(f"{len(sequences)} conversations, {learnt} tokens to learn, {model.num_parameters()} parameters")

    def report(step: int, loss: float) -> None:
        typer.echo(f"step {step:5d} of {steps}   loss {loss:.4f}   {time.monotonic() - started:.0f} s")

    fit(
        model,
        sequences,
        Recipe(steps=steps, learning_rate=learning_rate, batch=batch, seed=seed, by_length=by_length),
        report,
    )
    save_policy(out, tokenizer, model)
    typer.echo(f"policy written to {out}")


def save_policy(folder: Path, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Write an ordinary Hugging Face folder: safetensors, configuration, tokenizer, chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    content = json.loads(settings.read_text())
    # The class name that every version of transformers knows; newer ones write a name that older ones do not.
    content["tokenizer_class"] = "PreTrainedTokenizerFast"
    for how_it_was_loaded in ("is_local", "local_files_only"):
        content.pop(how_it_was_loaded, None)
    settings.write_text(json.dumps(content, indent=2) + "\n")


def _make(conversations: list[Conversation], vocabulary: int) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    from trainer_bridge.warmup_data import render
    from trainer_bridge.warmup_tokenizer import blank_tokenizer, train_tokenizer
    from trainer_bridge.warmup_training import new_model

    blank = blank_tokenizer()
    tokenizer = train_tokenizer((render(blank, conversation) for conversation in conversations), vocabulary)
    return tokenizer, new_model(tokenizer)


def _load(folder: Path) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise ConfigError(f"no policy at {folder}; expected a Hugging Face folder with config.json")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return AutoTokenizer.from_pretrained(folder), model


if __name__ == "__main__":
    typer.run(warmup)
