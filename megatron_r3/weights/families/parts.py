"""The parts of which the layers of all families are made: Megatron's names and transformers'.

Each function gives the tensors of one part of one layer. `layer` counts from 0.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_r3.weights.family import Mapped, halves, qkv, same
from megatron_r3.weights.pieces import Place

Names = tuple[str, str, str]
GATED: Names = ("gate_proj", "up_proj", "down_proj")  # of an MLP, as most families call them


def place(name: str, layer: int, expert: int | None = None) -> Place:
    """Megatron's tensor `name` of a layer."""
    return Place(f"decoder.layers.{name}", layer, expert)


def norms(layer: int) -> list[Mapped]:
    """The norms in front of attention and MLP."""
    theirs = f"model.layers.{layer}."
    return [
        same(f"{theirs}input_layernorm.weight", place("input_layernorm.weight", layer)),
        same(f"{theirs}post_attention_layernorm.weight", place("pre_mlp_layernorm.weight", layer)),
    ]


def attention(config: Any, layer: int) -> list[Mapped]:
    """Attention with grouped queries; its norms and its biases only where the model has them."""
    theirs = f"model.layers.{layer}.self_attn."

    def three(kind: str) -> Mapped:
        q, k, v = (f"{theirs}{part}_proj.{kind}" for part in "qkv")
        return qkv(config, (q, k, v), place(f"self_attention.linear_qkv.{kind}", layer))

    output = place("self_attention.linear_proj.weight", layer)
    mapped = [three("weight"), same(f"{theirs}o_proj.weight", output)]
    if config.add_qkv_bias:
        mapped.append(three("bias"))
    if config.qk_layernorm:
        for part in "qk":
            norm = place(f"self_attention.{part}_layernorm.weight", layer)
            mapped.append(same(f"{theirs}{part}_norm.weight", norm))
    return mapped


def latent_attention(config: Any, layer: int) -> list[Mapped]:
    """DeepSeek's attention (MLA). Both sides have the rotary part of a head in pairs x0 x1, x2 x3.

    Megatron turns such pairs by itself (`mla_rotary_interleaved` in multi_latent_attention.py), as
    transformers does with `rope_interleave`; so no row of a weight has to change its place.
    """
    names = {
        "kv_a_proj_with_mqa": "linear_kv_down_proj",
        "kv_a_layernorm": "kv_layernorm",
        "kv_b_proj": "linear_kv_up_proj",
        "o_proj": "linear_proj",
    }
    if config.q_lora_rank is None:
        names["q_proj"] = "linear_q_proj"
    else:
        names |= {"q_a_proj": "linear_q_down_proj", "q_b_proj": "linear_q_up_proj"}
        names["q_a_layernorm"] = "q_layernorm"
    return [
        same(
            f"model.layers.{layer}.self_attn.{theirs}.weight",
            place(f"self_attention.{ours}.weight", layer),
        )
        for theirs, ours in names.items()
    ]


def gated(
    theirs: str, ours: str, layer: int, expert: int | None = None, names: Names = GATED
) -> list[Mapped]:
    """A gated MLP: a dense layer's, an expert's, or that of shared experts.

    Args:
        theirs, ours: where it is, up to and with the last dot before its linear layers.
        names: what transformers calls gate, up and down.
    """
    gate, up, down = (f"{theirs}{name}.weight" for name in names)
    return [
        halves(gate, up, place(f"{ours}linear_fc1.weight", layer, expert)),
        same(down, place(f"{ours}linear_fc2.weight", layer, expert)),
    ]


def dense(layer: int) -> list[Mapped]:
    """The MLP of a layer without experts."""
    return gated(f"model.layers.{layer}.mlp.", "mlp.", layer)


def experts(config: Any, layer: int, block: str = "mlp", names: Names = GATED) -> list[Mapped]:
    """The router's weight and the experts.

    Args:
        block: what transformers calls the MoE layer.
        names: what it calls gate, up and down.
    """
    theirs = f"model.layers.{layer}.{block}."
    mapped = [same(f"{theirs}gate.weight", place("mlp.router.weight", layer))]
    for expert in range(config.num_moe_experts):
        inside = f"{theirs}experts.{expert}."
        mapped += gated(inside, "mlp.experts.experts.", layer, expert, names)
    return mapped


def shared_experts(layer: int, name: str) -> list[Mapped]:
    """The experts that every token goes to; Megatron and transformers have them as one MLP."""
    return gated(f"model.layers.{layer}.mlp.{name}.", "mlp.shared_experts.", layer)


def correction_bias(layer: int) -> Mapped:
    """What is added to the scores for choosing experts, and only for choosing them.

    Both sides keep it in float32 whatever the other weights have.
    """
    theirs = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
    return same(theirs, place("mlp.router.expert_bias", layer), torch.float32)
