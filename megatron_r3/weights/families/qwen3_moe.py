"""Qwen3-MoE: queries and keys have norms, nothing has a bias."""

from __future__ import annotations

from typing import Any, ClassVar

from megatron_r3.replay.layers import moe_layer_indices
from megatron_r3.weights.families.family_tables import (
    ANY,
    COMMON,
    DENSE_SIZE,
    EXPERT_SIZE,
    GROUPED_QUERIES,
    NORMALISED,
    PLAIN_FLAGS,
    Described,
    Fields,
    Flags,
    Rows,
    dense_and_moe,
    experts_named,
)
from megatron_r3.weights.families.parts import attention, dense, experts, norms
from megatron_r3.weights.family import Mapped, outside_of_layers


class Qwen3Moe(Described):
    """The family (`megatron_r3.weights.family.Family`)."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    rows: ClassVar[Rows] = (
        *COMMON,
        *GROUPED_QUERIES,
        experts_named("num_experts"),
        EXPERT_SIZE,
        DENSE_SIZE,
        NORMALISED,
    )
    flags: ClassVar[Flags] = (*PLAIN_FLAGS, "--qk-layernorm")
    fixed: ClassVar[Fields] = {"use_sliding_window": (False,)}
    reads: ClassVar[Flags] = ("mlp_only_layers", "decoder_sparse_step")
    ignores: ClassVar[Flags] = ("sliding_window", "max_window_layers")  # without use_sliding_window
    plain: ClassVar[Fields] = {"qk_layernorm": True, "moe_router_pre_softmax": ANY}

    def own_fields(self, config: Any) -> dict[str, Any]:
        """See `Described`."""
        return dense_and_moe(config)

    def tensors(self, config: Any) -> list[Mapped]:
        """All tensors of the model."""
        mapped, moe = outside_of_layers(), moe_layer_indices(config)
        for layer in range(config.num_layers):
            mapped += [*norms(layer), *attention(config, layer)]
            mapped += experts(config, layer) if layer in moe else dense(layer)
        return mapped
