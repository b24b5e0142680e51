"""Qwen3-MoE, the one model family that weights are moved for: its config and its tensors' names.

Megatron's names are those of its local layer spec and of its Transformer Engine spec (fused norms,
grouped experts). No test runs the names of the Transformer Engine spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_r3.integrations.layers import moe_layer_indices

# Megatron's name of each tensor outside the layers: transformers' name
VOCABULARY = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
}
_ROOT = {**VOCABULARY, "decoder.final_layernorm.weight": "model.norm.weight"}
# transformers' name of each tensor of a layer that is moved as it is: Megatron's possible names
_LAYER = {
    "input_layernorm.weight": (
        "input_layernorm.weight",
        "self_attention.linear_qkv.layer_norm_weight",  # Transformer Engine fuses the norm
    ),
    "post_attention_layernorm.weight": ("pre_mlp_layernorm.weight",),
    "self_attn.q_norm.weight": ("self_attention.q_layernorm.weight",),
    "self_attn.k_norm.weight": ("self_attention.k_layernorm.weight",),
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight",),
    "mlp.gate.weight": ("mlp.router.weight",),
}
# Megatron's name of each tensor of an expert: the parts that transformers has
_EXPERT = {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}


def check_config(config: Any) -> None:
    """Refuse a Megatron model that is not a Qwen3-MoE.

    Args:
        config: Megatron's TransformerConfig.

    Raises:
        ValueError: naming what the model lacks.
    """
    needed = [
        (config.num_moe_experts is not None, "num_moe_experts"),
        (config.qk_layernorm, "qk_layernorm"),
        (config.gated_linear_unit, "gated_linear_unit"),
        (config.normalization == "RMSNorm", "normalization=RMSNorm"),
        (not config.add_bias_linear, "no add_bias_linear"),
        (not getattr(config, "multi_latent_attention", False), "no multi_latent_attention"),
        (config.moe_router_score_function == "softmax", "softmax scores"),
        (len(moe_layer_indices(config)) == config.num_layers, "every layer MoE"),
        (not config.moe_shared_expert_intermediate_size, "no shared experts"),
        (not config.moe_router_enable_expert_bias, "no expert bias"),
        (not config.moe_router_num_groups, "no routing groups"),
        (not config.moe_router_topk_scaling_factor, "no routing scale"),
    ]
    if lacks := [name for holds, name in needed if not holds]:
        raise ValueError(f"only Qwen3-MoE models can be moved; this model lacks: {lacks}")


def hf_config(
    config: Any, vocab_size: int | None, rope_theta: float | None, max_positions: int
) -> dict[str, Any]:
    """transformers' config.json of a Megatron model.

    Args:
        config: Megatron's TransformerConfig.
        vocab_size: without padding.

    Raises:
        ValueError: the model is not a Qwen3-MoE.
    """
    check_config(config)
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "head_dim": config.kv_channels,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "max_position_embeddings": max_positions,
        "moe_intermediate_size": config.moe_ffn_hidden_size,
        "norm_topk_prob": not config.moe_router_pre_softmax,
        "num_attention_heads": config.num_attention_heads,
        "num_experts": config.num_moe_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_query_groups,
        "rms_norm_eps": config.layernorm_epsilon,
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": vocab_size,
    }


def tensor_names(config: Any, state: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """For each tensor of a Megatron model, the transformers tensors that it is joined from.

    Example: `decoder.layers.0.self_attention.linear_qkv.weight` is joined from
    `model.layers.0.self_attn.q_proj.weight`, `...k_proj.weight` and `...v_proj.weight`.

    Args:
        state: the model's state dict; its names say which of Megatron's layer specs it has.

    Raises:
        ValueError: the model has weights that transformers' Qwen3-MoE has no place for, or lacks
            some.
    """
    names = {ours: [theirs] for ours, theirs in _ROOT.items()}
    for layer in range(config.num_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for name, candidates in _LAYER.items():
            names[_present(state, ours, candidates)] = [theirs + name]
        names[ours + "self_attention.linear_qkv.weight"] = [
            f"{theirs}self_attn.{part}_proj.weight" for part in "qkv"
        ]
        for expert in range(config.num_moe_experts):
            for linear, parts in _EXPERT.items():
                # the local spec has a module for each expert, Transformer Engine a weight
                candidates = (
                    f"local_experts.{expert}.{linear}.weight",
                    f"{linear}.weight{expert}",
                )
                names[_present(state, ours + "mlp.experts.", candidates)] = [
                    f"{theirs}mlp.experts.{expert}.{part}.weight" for part in parts
                ]
    without_place = [n for n in state if n not in names and not n.endswith("_extra_state")]
    missing = sorted(names.keys() - state.keys())
    if without_place or missing:
        raise ValueError(
            f"not a plain Qwen3-MoE (tied embeddings, biases, MTP?): transformers has no place for "
            f"{without_place[:3]}, the model has no {missing[:3]}"
        )
    return names


def _present(state: Mapping[str, Tensor], prefix: str, candidates: tuple[str, ...]) -> str:
    for candidate in candidates:
        if prefix + candidate in state:
            return prefix + candidate
    raise ValueError(f"the model has none of {[prefix + candidate for candidate in candidates]}")


def split(name: str, tensor: Tensor, config: Any) -> list[Tensor]:
    """The transformers tensors of a Megatron tensor.

    Example of `linear_qkv` with 4 heads in 2 query groups: Megatron's rows are, head by head,
    q0 q1 k0 v0 q2 q3 k1 v1 (each group's queries, then its key and its value); transformers has the
    three tensors q0 q1 q2 q3, k0 k1 and v0 v1. `linear_fc1` has the rows of gate_proj, then those
    of up_proj.
    """
    if name.endswith("linear_qkv.weight"):
        groups = config.num_query_groups
        queries = config.num_attention_heads // groups
        by_group = tensor.view(groups, queries + 2, config.kv_channels, -1)
        parts = by_group.split([queries, 1, 1], dim=1)
        return [part.reshape(-1, tensor.shape[-1]) for part in parts]
    return list(tensor.chunk(2)) if "linear_fc1" in name else [tensor]


def join(name: str, parts: list[Tensor], config: Any) -> Tensor:
    """The Megatron tensor of its transformers tensors: the inverse of `split`."""
    if name.endswith("linear_qkv.weight"):
        groups, hidden = config.num_query_groups, parts[0].shape[-1]
        by_group = [part.view(groups, -1, config.kv_channels, hidden) for part in parts]
        return torch.cat(by_group, dim=1).reshape(-1, hidden)
    return torch.cat(parts)
