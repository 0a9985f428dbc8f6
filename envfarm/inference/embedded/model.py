"""A Hugging Face causal LM that decodes many rows at once and takes new weights between two tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from envfarm.core.errors import ConfigError, EngineError
from envfarm.inference.embedded.attention import NAME, Batch, forward_pass
from envfarm.inference.embedded.kv import KVBuffer

Weights = dict[str, torch.Tensor]


class CausalModel:
    """Weights of one model folder and the way to run them on a packed :class:`Batch`."""

    def __init__(self, folder: Path, *, dtype: torch.dtype) -> None:
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} is not a model folder: config.json is missing; expected a Hugging Face folder")
        try:
            self.config = AutoConfig.from_pretrained(folder)
            _check_supported(folder, self.config)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation=NAME, output_loading_info=True
            )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise ConfigError(f"cannot load the model in {folder}: {error}") from error
        model, info = loaded
        self._model: PreTrainedModel = model
        if info["missing_keys"]:  # transformers would go on with random numbers in their place
            missing = sorted(info["missing_keys"])
            raise ConfigError(f"the weights in {folder} lack {', '.join(missing[:3])} ({len(missing)} in all)")
        self._model.train(mode=False)
        self._dtype = dtype
        self._model.requires_grad_(requires_grad=False)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.config.vocab_size)

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the model was made for, if its config says so."""
        limit = getattr(self.config, "max_position_embeddings", None)
        return int(limit) if limit else None

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self._model.parameters())

    @property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end an answer unless a request ignores them."""
        generation = getattr(self._model, "generation_config", None)
        found = getattr(generation, "eos_token_id", None) or getattr(self.config, "eos_token_id", None)
        if found is None:
            return frozenset()
        return frozenset(found) if isinstance(found, (list, tuple)) else frozenset({int(found)})

    def kv_shape(self, context: int) -> dict[str, int]:
        """Arguments of :class:`KVBuffer` that follow from the model."""
        heads = int(self.config.num_attention_heads)
        return {
            "layers": int(self.config.num_hidden_layers),
            "kv_heads": int(getattr(self.config, "num_key_value_heads", None) or heads),
            "context": context,
            "head_dim": int(getattr(self.config, "head_dim", None) or self.config.hidden_size // heads),
        }

    def kv_row_bytes(self, context: int) -> int:
        """Bytes of one row's keys and values at full context."""
        return KVBuffer.row_bytes(**self.kv_shape(context), dtype=self._dtype)

    def new_kv(self, *, slots: int, context: int) -> KVBuffer:
        """A buffer that fits this model."""
        return KVBuffer(**self.kv_shape(context), slots=slots, dtype=self._dtype)

    def logits(self, batch: Batch, kv: KVBuffer) -> torch.Tensor:
        """Logits (rows, vocabulary) after each row's final token; keys and values of the pass go into ``kv``."""
        with torch.inference_mode(), forward_pass(batch, kv):
            out = self._model(
                input_ids=batch.input_ids,
                position_ids=batch.positions,
                use_cache=False,
                logits_to_keep=batch.rows,
            )
        logits: torch.Tensor = out.logits[0]
        return logits

    def read_weights(self, folder: Path) -> Weights:
        """Weights under ``folder``, checked against this model, ready for :meth:`swap`. May run in any thread."""
        weights: Weights = {}
        try:
            for file in _weight_files(folder):
                weights.update(load_file(file))
        except (SafetensorError, OSError, msgspec.DecodeError) as error:
            raise EngineError(f"cannot read weights under {folder}: {error}") from error
        mismatch = self._mismatch(weights)
        if mismatch is None:
            return weights
        return self._convert(folder, mismatch)

    def swap(self, weights: Weights) -> None:
        """Put checked weights in place. Call between two forward passes."""
        own = self._model.state_dict()
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)

    def _mismatch(self, weights: Weights) -> str | None:
        own = self._model.state_dict()
        tied = set(getattr(self._model, "all_tied_weights_keys", None) or {})
        missing = own.keys() - weights.keys() - tied
        unknown = weights.keys() - own.keys()
        if missing or unknown:
            return f"missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}"
        for name, tensor in weights.items():
            if tensor.shape != own[name].shape:
                return f"{name} has shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)}"
        return None

    def _convert(self, folder: Path, mismatch: str) -> Weights:
        """Weights whose file layout differs from the model's own (fused experts), by way of transformers."""
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=self._dtype)
        except (OSError, ValueError, RuntimeError) as error:
            raise EngineError(f"weights under {folder} do not fit the served model ({mismatch}): {error}") from error
        weights: Weights = dict(model.state_dict())
        remaining = self._mismatch(weights)
        if remaining is not None:
            raise EngineError(f"weights under {folder} do not fit the served model: {remaining}")
        return weights


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _weight_files(folder: Path) -> list[Path]:
    """The files that a model folder's weights are in: one, or those that its index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()
        return [folder / name for name in sorted(set(names))]
    raise EngineError(f"no model.safetensors in {folder}; expected the weights of a Hugging Face folder")


def _check_supported(folder: Path, config: PretrainedConfig) -> None:
    kinds = set(getattr(config, "layer_types", None) or {"full_attention"})
    if kinds != {"full_attention"} or getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"the embedded engine runs decoder-only models with full attention; {folder} "
            f"({config.model_type}) has {', '.join(sorted(kinds))}: serve it with SGLang"
        )
