"""Whether a config.json describes a Megatron model that belongs to no family of this project.

The Megatron model is compared with config.json, and with the config that the bridge builds from
config.json. A field of TransformerConfig that neither comparison covers must have Megatron's
default.
"""

from __future__ import annotations

from typing import Any

from megatron_r3.replay.layers import moe_layer_indices
from megatron_r3.replay.words import quoted
from megatron_r3.weights.family import ModelSettings
from megatron_r3.weights.known import BALANCING, defaults, rope_of, routes_itself

# Fields of TransformerConfig that change what a model computes, and that a bridge sets: for every
# model, for a model with experts, and for one with latent attention (MLA).
_BUILT = """
normalization layernorm_zero_centered_gamma gated_linear_unit activation_func add_bias_linear
add_qkv_bias qk_layernorm multi_latent_attention attention_output_gate window_size softmax_type
softmax_scale num_moe_experts
""".split()
_BUILT_MOE = """
moe_router_topk moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
moe_router_score_function moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias
moe_router_topk_scaling_factor
""".split()
_BUILT_MLA = "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim".split()
# Fields that `_expected` and `compare_models` compare, or that change nothing in plain RoPE. Any
# other field that may change a model must have Megatron's default: see `_refuse_odd`.
_COMPARED = """
num_layers hidden_size num_attention_heads num_query_groups kv_channels layernorm_epsilon
ffn_hidden_size moe_layer_freq moe_router_pre_softmax rotary_base rotary_percent rope_type
rotary_scaling_factor mscale
""".split()
_ABSENT = object()


def compare_models(
    hf_config: Any, built: Any, title: str, config: Any, settings: ModelSettings
) -> None:
    """Refuse a config.json that does not describe the Megatron model.

    Args:
        hf_config: transformers' config, with transformers' defaults for what config.json lacks.
        built: the config that the bridge builds from `hf_config`.
        title: the bridge and its version.
        config: Megatron's TransformerConfig.

    Raises:
        ValueError: naming the first field that differs, or that cannot be compared.
    """
    _refuse_unknown(hf_config, title)
    _refuse_odd(config, title)
    for name, ours in _expected(hf_config, config, settings).items():
        theirs = getattr(hf_config, name, _ABSENT)
        if name == "head_dim" and theirs in (None, _ABSENT):
            theirs = hf_config.hidden_size // hf_config.num_attention_heads
        if theirs is not _ABSENT and theirs != ours:
            raise _other(f"{name} is {quoted(theirs)}", quoted(ours))
    names = [*_BUILT, *(_BUILT_MOE if config.num_moe_experts else ())]
    for name in [*names, *(_BUILT_MLA if config.multi_latent_attention else ())]:
        ours, theirs = getattr(config, name, None), getattr(built, name, None)
        # None, False and 0 all say that an option is off
        if theirs != ours and (theirs or ours):
            raise _other(f"{title} reads {name} as {_shown(theirs)}", _shown(ours))
    moe, theirs_moe = (_moe_layers(each) for each in (config, built))
    if moe != theirs_moe:
        raise _other(f"{title} puts experts into the layers {theirs_moe}", str(moe))
    if len(moe) < config.num_layers and built.ffn_hidden_size != config.ffn_hidden_size:
        theirs_ffn = f"{title} reads ffn_hidden_size as {built.ffn_hidden_size}"
        raise _other(theirs_ffn, str(config.ffn_hidden_size))


def _expected(hf_config: Any, config: Any, settings: ModelSettings) -> dict[str, Any]:
    """The values that config.json must have to describe the Megatron model, by field."""
    expected = {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "rms_norm_eps": config.layernorm_epsilon,
        "rope_theta": settings.rotary_base,
        "tie_word_embeddings": settings.tied,
    }
    if settings.vocab_size is not None:
        expected["vocab_size"] = settings.vocab_size
    if not config.multi_latent_attention:
        expected["num_key_value_heads"] = config.num_query_groups
        expected["head_dim"] = config.kv_channels
    if config.num_moe_experts:
        expected["num_experts_per_tok"] = config.moe_router_topk
        if config.moe_router_score_function == "softmax":
            expected["norm_topk_prob"] = not config.moe_router_pre_softmax
    turned = rope_of(vars(hf_config)).get("partial_rotary_factor", _ABSENT)
    turned = getattr(hf_config, "partial_rotary_factor", 1.0) if turned is _ABSENT else turned
    if settings.rotary_percent != (1.0 if turned is None else turned):
        raise _other(f"partial_rotary_factor is {quoted(turned)}", str(settings.rotary_percent))
    kinds = {settings.position_embedding_type, getattr(config, "rope_type", "rope")}
    if kinds != {"rope"} or settings.rotary_scaling or settings.interpolation:
        raise ValueError(
            "a bridge can move only models with plain RoPE; Megatron's arguments set another "
            "position embedding, or scale or interpolate RoPE"
        )
    return expected


def _refuse_unknown(hf_config: Any, title: str) -> None:
    """Refuse quantized weights, scaled RoPE, and layers without full attention."""
    kind = rope_of(vars(hf_config)).get("rope_type", "default")
    kinds = {*(getattr(hf_config, "layer_types", None) or ("full_attention",))}
    for name, value, can in (
        ("quantization_config", getattr(hf_config, "quantization_config", None) or None, None),
        ("rope_type", kind, "default"),
        ("layer_types", sorted(kinds), ["full_attention"]),
    ):
        if value != can:
            raise ValueError(
                f"{name} is {quoted(value)}; {title} can move a model only with {quoted(can)}, "
                f"because {name} is not compared with Megatron's arguments"
            )


def _refuse_odd(config: Any, title: str) -> None:
    """Refuse a field of TransformerConfig that is not at its default and is not compared."""
    expected = defaults(type(config))
    for name in expected.keys() - {*_BUILT, *_BUILT_MOE, *_BUILT_MLA, *_COMPARED}:
        value = getattr(config, name)
        if routes_itself(value) if name == BALANCING else value != expected[name]:
            raise ValueError(
                f"{name} is {_shown(value)}; {title} can move a model only with "
                f"{_shown(expected[name])}, because {name} is not compared with config.json"
            )


def _moe_layers(config: Any) -> tuple[int, ...]:
    return moe_layer_indices(config) if config.num_moe_experts else ()


def _shown(value: Any) -> str:
    return quoted(getattr(value, "__name__", value))


def _other(theirs: str, ours: str) -> ValueError:
    return ValueError(f"{theirs}; Megatron's arguments say {ours}: give this model's arguments")
