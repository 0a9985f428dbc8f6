"""Any Hugging Face causal language model as a policy: load it, score sampled tokens, write it back as a folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from envfarm.core.errors import ConfigError
from trainer_bridge.durable import draft_of, settle

MAX_SHARD = "5GB"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf", ".*")


@dataclass(frozen=True, slots=True)
class Policy:
    """A model with float32 master weights, the folder it came from, and the dtype that folder keeps."""

    model: nn.Module
    folder: Path
    stored_dtype: torch.dtype

    @property
    def vocabulary(self) -> int:
        """Width of the logits."""
        config: Any = self.model.config
        return int(config.get_text_config().vocab_size)


def load_policy(folder: Path, *, device: str = "cpu") -> Policy:
    """The causal language model in ``folder``, in training mode.

    Raises ``ConfigError`` when the folder is not a Hugging Face model folder.
    """
    from transformers import AutoModelForCausalLM

    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"{folder} has no config.json; expected a Hugging Face folder with weights and tokenizer")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        raw = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a causal language model from {folder}: {error}") from error
    dtype = getattr(torch, str(raw.get("dtype") or raw.get("torch_dtype") or "float32"), torch.float32)
    return Policy(model.to(device).train(), folder, dtype)


def token_logprobs(
    model: nn.Module, input_ids: Tensor, select: Tensor, targets: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ``targets`` [N] and the entropy [N] of the distributions they were drawn from.

    ``input_ids`` [B, L] right-padded; ``select`` [B, L] bool, true at the N positions that predict ``targets``, in row
    order. Only those positions reach the vocabulary projection. Goes through the model's own forward, which sharded
    models need. Logits are divided by ``temperature`` first, as the sampler does. The entropy has no gradient.
    """
    logits = model(input_ids=input_ids, logits_to_keep=select, use_cache=False).logits
    if temperature != 1.0:
        logits = logits / temperature
    log_softmax = torch.log_softmax(logits.float(), dim=-1)
    logprobs = log_softmax.gather(-1, targets[:, None]).squeeze(-1)
    with torch.no_grad():
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return logprobs, entropy


def write_policy(policy: Policy, weights: dict[str, Tensor], folder: Path) -> None:
    """Write ``weights`` (full tensors, the model's names) and all but the weights of the policy's own folder.

    The result loads in transformers and in SGLang: names and dtype are those of the policy's folder, tied weights are
    written once. ``folder`` appears at once or not at all, and is on disk when this returns.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    draft = draft_of(folder)
    shutil.copytree(policy.folder, draft, ignore=shutil.ignore_patterns(*_WEIGHTS, "original"))
    tensors = _as_stored(policy, weights)
    plan = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=MAX_SHARD
    )
    for name, keys in plan.filename_to_tensors.items():
        save_file({key: tensors[key] for key in keys}, draft / name, metadata={"format": "pt"})
        # The engine may run as another user: weights are as readable as the configuration beside them.
        shutil.copymode(policy.folder / "config.json", draft / name)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (draft / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    settle(draft, folder)


def _as_stored(policy: Policy, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the names and in the dtype of the checkpoint on disk, each tied one once."""
    from transformers.core_model_loading import revert_weight_conversion

    model: Any = policy.model
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    kept = {name: tensor for name, tensor in weights.items() if name not in tied}
    stored: dict[str, Tensor] = revert_weight_conversion(model, kept)
    return {name: tensor.to(policy.stored_dtype).contiguous() for name, tensor in stored.items()}
