"""GLM-4.5: DeepSeek's experts behind grouped queries, of which RoPE turns a part of each head."""

from __future__ import annotations

from typing import Any, ClassVar

from megatron_r3.weights.families.family_tables import (
    ANY,
    GROUPED_QUERIES,
    Fields,
    Number,
    Rows,
    Switch,
)
from megatron_r3.weights.families.parts import attention, norms
from megatron_r3.weights.families.routing import SigmoidRouted
from megatron_r3.weights.family import Mapped, outside_of_layers


class Glm4Moe(SigmoidRouted):
    """The family (`megatron_r3.weights.family.Family`).

    Of the GLM-4.5 models some have norms of queries and keys (`use_qk_norm`) and some have none.
    """

    model_type = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    rows: ClassVar[Rows] = (
        *SigmoidRouted.rows,
        *GROUPED_QUERIES,
        Number("partial_rotary_factor", "rotary-percent", "rotary_percent", 0.5),
        Switch("attention_bias", "add-qkv-bias", "add_qkv_bias", False),
        Switch("use_qk_norm", "qk-layernorm", "qk_layernorm", False),
    )
    fixed: ClassVar[Fields] = {
        **SigmoidRouted.fixed,
        "attention_bias": ANY,
        "partial_rotary_factor": ANY,
    }
    plain: ClassVar[Fields] = {**SigmoidRouted.plain, "add_qkv_bias": ANY, "qk_layernorm": ANY}
    settings: ClassVar[Fields] = {"rotary_percent": ANY}

    def tensors(self, config: Any) -> list[Mapped]:
        """All tensors of the model."""
        mapped = outside_of_layers()
        for layer in range(config.num_layers):
            mapped += [*norms(layer), *attention(config, layer), *self.mlp(config, layer)]
        return mapped
