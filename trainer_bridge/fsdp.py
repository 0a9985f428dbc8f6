"""FSDP2: shard a model over the ranks, gather its weights, norms over shards. One rank on a CPU stays unsharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer_bridge.ranks import Ranks


def shard(model: nn.Module, ranks: Ranks) -> nn.Module:
    """Shard each decoder layer, then the root, over all ranks, in place.

    Embedding and head stay in the root, because they may be tied. On GPUs compute is bfloat16 and gradients are
    reduced in float32; on CPUs all is float32. Call only the root's forward afterwards: it gathers the weights.
    """
    if not ranks.grouped:
        return model
    mesh = init_device_mesh(ranks.device, (ranks.world,))
    policy = MixedPrecisionPolicy()
    if ranks.device == "cuda":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The longest ``ModuleList`` of one type of module with parameters: the transformer's blocks."""
    longest: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > len(longest) and any(True for _ in module.parameters()):
            longest = list(module)
    return longest


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Full weights on the CPU by name. Collective; empty on every rank but the first."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {
        name: value for name, value in get_model_state_dict(model, options=options).items() if torch.is_tensor(value)
    }


def clip_gradients(parameters: Iterable[Tensor], limit: float) -> float:
    """Scale gradients so that their global L2 norm is at most ``limit``; returns the norm before. Collective."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
