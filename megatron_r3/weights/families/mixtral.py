"""Mixtral: every layer has experts; nothing has a bias, and queries and keys have no norms."""

from __future__ import annotations

from typing import Any, ClassVar

from megatron_r3.replay.layers import moe_layer_indices
from megatron_r3.weights.families.family_tables import (
    COMMON,
    GROUPED_QUERIES,
    Described,
    Fields,
    Flags,
    Number,
    Rows,
    experts_named,
)
from megatron_r3.weights.families.parts import attention, experts, norms
from megatron_r3.weights.family import Mapped, ModelSettings, outside_of_layers


class Mixtral(Described):
    """The family (`megatron_r3.weights.family.Family`)."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    rows: ClassVar[Rows] = (
        *COMMON,
        *GROUPED_QUERIES,
        experts_named("num_local_experts"),
        Number("intermediate_size", "moe-ffn-hidden-size", "moe_ffn_hidden_size"),
    )
    fixed: ClassVar[Fields] = {"sliding_window": (None,)}
    ignores: ClassVar[Flags] = ("router_jitter_noise",)  # in training alone
    # the weights of a token's experts add up to 1: a softmax over those that were chosen
    plain: ClassVar[Fields] = {"moe_router_pre_softmax": False}

    def own_check(self, config: Any, settings: ModelSettings) -> list[tuple[bool, str]]:
        """See `Described`."""
        every = config.num_moe_experts and len(moe_layer_indices(config)) == config.num_layers
        return [(bool(every), "experts in every layer")]

    def own_arguments(self, fields: Fields) -> list[str]:
        """See `Described`."""
        return ["--ffn-hidden-size", str(fields["intermediate_size"])]  # of no layer

    def tensors(self, config: Any) -> list[Mapped]:
        """All tensors of the model."""
        mapped = outside_of_layers()
        for layer in range(config.num_layers):
            mapped += [*norms(layer), *attention(config, layer)]
            mapped += experts(config, layer, "block_sparse_moe", ("w1", "w3", "w2"))
        return mapped
