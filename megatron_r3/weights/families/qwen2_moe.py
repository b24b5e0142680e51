"""Qwen2-MoE: one shared expert with a gate of its own, biases on queries, keys and values."""

from __future__ import annotations

from typing import Any, ClassVar

from megatron_r3.replay.layers import moe_layer_indices
from megatron_r3.weights.families.family_tables import (
    ANY,
    COMMON,
    DENSE_SIZE,
    EXPERT_SIZE,
    NORMALISED,
    PLAIN_FLAGS,
    Described,
    Fields,
    Flags,
    Number,
    Rows,
    Switch,
    cannot,
    dense_and_moe,
    experts_named,
)
from megatron_r3.weights.families.parts import (
    attention,
    dense,
    experts,
    norms,
    place,
    shared_experts,
)
from megatron_r3.weights.family import Mapped, ModelSettings, outside_of_layers, same

_SHARED = "moe_shared_expert_intermediate_size"


class Qwen2Moe(Described):
    """The family (`megatron_r3.weights.family.Family`)."""

    model_type = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    rows: ClassVar[Rows] = (
        *COMMON,
        Number("num_key_value_heads", "num-query-groups", "num_query_groups"),
        experts_named("num_experts"),
        EXPERT_SIZE,
        DENSE_SIZE,
        Number("shared_expert_intermediate_size", _SHARED.replace("_", "-"), _SHARED),
        NORMALISED,
        Switch("qkv_bias", "add-qkv-bias", "add_qkv_bias", True),
    )
    flags: ClassVar[Flags] = (*PLAIN_FLAGS, "--moe-shared-expert-gate")
    fixed: ClassVar[Fields] = {"use_sliding_window": (False,)}
    reads: ClassVar[Flags] = ("mlp_only_layers", "decoder_sparse_step", "head_dim")
    ignores: ClassVar[Flags] = ("sliding_window", "max_window_layers")  # without use_sliding_window
    plain: ClassVar[Fields] = {
        "moe_shared_expert_gate": True,
        "moe_shared_expert_intermediate_size": ANY,
        "add_qkv_bias": ANY,
    }

    def own_check(self, config: Any, settings: ModelSettings) -> list[tuple[bool, str]]:
        """See `Described`."""
        heads = config.kv_channels * config.num_attention_heads
        return [
            (heads == config.hidden_size, "heads of hidden_size / num_attention_heads"),
            (bool(config.moe_shared_expert_intermediate_size), "a shared expert"),
        ]

    def own_fields(self, config: Any) -> dict[str, Any]:
        """See `Described`."""
        return dense_and_moe(config)

    def own_described(self, theirs: Fields, fields: Fields) -> dict[str, Any]:
        """See `Described`."""
        head = fields["hidden_size"] // fields["num_attention_heads"]
        if theirs["head_dim"] != head:
            raise cannot(self.model_type, "head_dim", theirs["head_dim"], f"only {head}")
        return {}

    def tensors(self, config: Any) -> list[Mapped]:
        """All tensors of the model."""
        mapped = outside_of_layers()
        moe = moe_layer_indices(config)
        for layer in range(config.num_layers):
            mapped += [*norms(layer), *attention(config, layer)]
            if layer not in moe:
                mapped += dense(layer)
                continue
            gate = place("mlp.shared_experts.gate_weight", layer)
            mapped += [*experts(config, layer), *shared_experts(layer, "shared_expert")]
            mapped.append(same(f"model.layers.{layer}.mlp.shared_expert_gate.weight", gate))
        return mapped
