"""DeepSeek-V3 and what is built as it is, e.g. Moonlight: latent attention (MLA)."""

from __future__ import annotations

from typing import Any, ClassVar

from megatron_r3.weights.families.family_tables import ANY, Fields, Flags, Number, Rows, cannot
from megatron_r3.weights.families.parts import latent_attention, norms
from megatron_r3.weights.families.routing import SigmoidRouted
from megatron_r3.weights.family import Mapped, ModelSettings, outside_of_layers

# Megatron's own numbers for YaRN, which no argument changes (MLATransformerConfig)
_YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
_YARN_FLAGS = {
    "factor": "--rotary-scaling-factor",
    "mscale": "--mscale",
    "mscale_all_dim": "--mscale-all-dim",
}


class DeepseekV3(SigmoidRouted):
    """The family (`megatron_r3.weights.family.Family`).

    The two norms inside of MLA have the epsilon 1e-6 in transformers, whatever `rms_norm_eps` is;
    in Megatron all norms have the same one.
    """

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    rows: ClassVar[Rows] = (
        *SigmoidRouted.rows,
        Number("kv_lora_rank", "kv-lora-rank", "kv_lora_rank"),
        Number("qk_nope_head_dim", "qk-head-dim", "qk_head_dim"),
        Number("qk_rope_head_dim", "qk-pos-emb-head-dim", "qk_pos_emb_head_dim"),
        Number("v_head_dim", "v-head-dim", "v_head_dim"),
    )
    flags: ClassVar[Flags] = (*SigmoidRouted.flags, "--multi-latent-attention", "--qk-layernorm")
    fixed: ClassVar[Fields] = {
        **SigmoidRouted.fixed,
        "rope_interleave": (True,),
        "rope_type": ANY,
        # transformers knows no other routing and does not write these, but vLLM without them takes
        # softmax, and has no correction bias
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
    }
    reads: ClassVar[Flags] = (*SigmoidRouted.reads, "q_lora_rank", "num_key_value_heads")
    # sums and parts of qk_nope_head_dim and qk_rope_head_dim
    ignores: ClassVar[Flags] = (*SigmoidRouted.ignores, "head_dim", "qk_head_dim")
    plain: ClassVar[Fields] = {
        **SigmoidRouted.plain,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        **dict.fromkeys(("q_lora_rank", "rope_type", "rotary_scaling_factor"), ANY),
        **dict.fromkeys(("mscale", "mscale_all_dim"), ANY),
    }

    def own_check(self, config: Any, settings: ModelSettings) -> list[tuple[bool, str]]:
        """See `Described`."""
        needed = super().own_check(config, settings)
        if not config.multi_latent_attention:
            return needed
        if config.rope_type == "yarn":
            needed += [(getattr(config, n) == value, f"{n}={value}") for n, value in _YARN.items()]
            return [*needed, (_same_scale(config.mscale, config.mscale_all_dim), _SCALES)]
        # without YaRN too, this scales Megatron's softmax
        return [*needed, (not config.mscale_all_dim, "no mscale_all_dim without YaRN")]

    def own_fields(self, config: Any) -> dict[str, Any]:
        """See `Described`."""
        rope: dict[str, Any] = {"rope_type": "default"}
        if config.rope_type == "yarn":
            rope = {**_YARN, "rope_type": "yarn", "factor": config.rotary_scaling_factor}
            rope |= {"mscale": config.mscale, "mscale_all_dim": config.mscale_all_dim}
        return {
            **super().own_fields(config),
            "q_lora_rank": config.q_lora_rank,
            "num_key_value_heads": config.num_attention_heads,
            **rope,
        }

    def own_described(self, theirs: Fields, fields: Fields) -> dict[str, Any]:
        """See `Described`."""
        heads = fields["num_attention_heads"]
        if (groups := theirs.get("num_key_value_heads", heads)) != heads:
            raise cannot(self.model_type, "num_key_value_heads", groups, f"only {heads}, all heads")
        rank = theirs.get("q_lora_rank")
        if rank is not None and type(rank) is not int:
            raise ValueError("q_lora_rank must be a whole number or null")
        own = {**super().own_described(theirs, fields), "q_lora_rank": rank}
        kind = own["rope_type"] = theirs["rope_type"]
        if kind == "default":
            return own
        if kind != "yarn":
            raise cannot(self.model_type, "rope_type", kind, "default and yarn")
        for name, value in {**_YARN, "attention_factor": None, "truncate": True}.items():
            if theirs.get(name, value) != value:
                raise cannot(self.model_type, name, theirs[name], f"only {value}")
        for name in _YARN_FLAGS:
            if not isinstance(theirs.get(name), (int, float)):
                raise ValueError(f"{name} of rope_parameters is missing")
            own[name] = theirs[name]
        if not _same_scale(own["mscale"], own["mscale_all_dim"]):
            raise cannot(self.model_type, "mscale", own["mscale"], _SCALES)
        return own

    def own_arguments(self, fields: Fields) -> list[str]:
        """See `Described`."""
        found = super().own_arguments(fields)
        # Megatron's attention asks for it; MLA then uses the sizes above
        found += ["--kv-channels", str(fields["v_head_dim"])]
        if fields["q_lora_rank"] is not None:
            found += ["--q-lora-rank", str(fields["q_lora_rank"])]
        if fields["rope_type"] == "default":
            return [*found, "--rope-type", "rope"]
        yarn = [part for name, flag in _YARN_FLAGS.items() for part in (flag, str(fields[name]))]
        return [*found, "--rope-type", "yarn", *yarn]

    def tensors(self, config: Any) -> list[Mapped]:
        """All tensors of the model."""
        mapped = outside_of_layers()
        for layer in range(config.num_layers):
            mapped += [*norms(layer), *latent_attention(config, layer), *self.mlp(config, layer)]
        return mapped


_SCALES = "mscale and mscale_all_dim, both not 0, or mscale 1 with mscale_all_dim 0"


def _same_scale(mscale: float, mscale_all_dim: float) -> bool:
    """Whether both sides scale YaRN's cosines the same.

    Both divide the scale of `mscale` by that of `mscale_all_dim`; where one of them is 0,
    transformers takes the scale of 1 instead.
    """
    return bool(mscale and mscale_all_dim) or (mscale == 1 and not mscale_all_dim)
