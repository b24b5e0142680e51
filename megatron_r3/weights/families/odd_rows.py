"""Rows with functions of their own: layers, groups, shared experts, YaRN, windows, activation."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from megatron_r3.data.engines.shape import ModelShape
from megatron_r3.replay.layers import moe_layer_indices
from megatron_r3.replay.words import quoted
from megatron_r3.seams.arguments import LATENT_YARN
from megatron_r3.weights.families.field_rows import (
    Fields,
    Needed,
    Row,
    cannot,
    fixed,
    number,
    shown,
)
from megatron_r3.weights.family import ModelSettings

# -- which layers have experts

# the name of the rows below: all fields of config.json that can say which layers have experts
MOE_LAYERS = (
    "mlp_only_layers, decoder_sparse_step, first_k_dense_replace, moe_layer_freq or mlp_layer_types"
)


def _moe_layers(theirs: Fields, done: Fields) -> tuple[int, ...]:
    return ModelShape.from_hf_config(theirs).moe_layers


def _layer_pattern(moe: tuple[int, ...], fields: Fields) -> list[str]:
    """--moe-layer-freq, e.g. `([0]*3+[1]*58)`: 3 dense layers first; [] if no layer is dense."""
    layers = range(fields["num_hidden_layers"])
    if moe == tuple(layers):
        return []
    runs = itertools.groupby(int(layer in moe) for layer in layers)
    pattern = "+".join(f"[{kind}]*{len(list(run))}" for kind, run in runs)
    return ["--moe-layer-freq", f"({pattern})"]


def _dense(config: Any) -> list[int]:
    """The layers of a Megatron model that have no experts."""
    return sorted({*range(config.num_layers)} - {*moe_layer_indices(config)})


# four ways in which a config.json can say which layers have experts
EVERY_LAYER = Row(
    MOE_LAYERS,
    _moe_layers,
    arguments=_layer_pattern,
    needs=lambda config: [(not _dense(config), "experts in every layer")],
)
SOME_LAYERS = replace(
    EVERY_LAYER,
    write=lambda config, settings, made: {
        "decoder_sparse_step": 1,
        "mlp_only_layers": _dense(config),
    },
    names=("decoder_sparse_step", "mlp_only_layers"),
    needs=lambda config: [],
)
LATER_LAYERS = replace(
    EVERY_LAYER,
    write=lambda config, settings, made: {
        "first_k_dense_replace": len(_dense(config)),
        "moe_layer_freq": 1,
    },
    names=("first_k_dense_replace", "moe_layer_freq"),
    needs=lambda config: [
        (
            _dense(config) == [*range(len(_dense(config)))],
            "dense layers only before the first layer with experts",
        )
    ],
)

# transformers reads `mlp_layer_types`, vLLM `first_k_dense_replace`
NAMED_LAYERS = replace(
    LATER_LAYERS,
    write=lambda config, settings, made: {
        "first_k_dense_replace": (dense := len(_dense(config))),
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (config.num_layers - dense),
    },
    names=(*LATER_LAYERS.names, "mlp_layer_types"),
)

# -- shared experts, to which every token goes: in Megatron they are one MLP of their joint size


def _shared_experts(config: Any) -> float:
    """The size of the shared MLP divided by the size of a routed expert, e.g. 2.0."""
    return (config.moe_shared_expert_intermediate_size or 0) / (config.moe_ffn_hidden_size or 1)


SHARED_EXPERTS = Row(
    "n_shared_experts",
    lambda theirs, done: _whole(theirs, "n_shared_experts"),
    lambda config, settings, made: {"n_shared_experts": int(_shared_experts(config))},
    lambda shared, fields: [
        "--moe-shared-expert-intermediate-size",
        shown(shared * fields["moe_intermediate_size"]),
    ],
    attributes=("moe_shared_expert_intermediate_size",),
    needs=lambda config: [
        (_shared_experts(config) >= 1 and _shared_experts(config) % 1 == 0, "whole shared experts")
    ],
)

# -- groups of experts: how many groups there are, and how many of them a token may choose


def _groups(theirs: Fields, done: Fields) -> tuple[int, int] | None:
    """How many groups there are, and how many are chosen for a token; None if all are chosen.

    A group's score is the sum of the best scores of its experts: of the best 2 in transformers, of
    the best topk // topk_group in Megatron (group_limited_topk in moe_utils.py).
    """
    groups, chosen = _whole(theirs, "n_group"), _whole(theirs, "topk_group")
    topk = done["num_experts_per_tok"]
    if chosen < groups and topk // chosen != 2:
        can = f"{topk // 2} with num_experts_per_tok {topk} (or {groups}, all groups)"
        raise cannot(theirs, "topk_group", can)
    return (groups, chosen) if chosen < groups else None


def _group_arguments(value: tuple[int, int] | None, fields: Fields) -> list[str]:
    if value is None:
        return []
    return f"--moe-router-num-groups {value[0]} --moe-router-group-topk {value[1]}".split()


def _two_experts_of_a_group(config: Any) -> Needed:
    groups, chosen = config.moe_router_num_groups, config.moe_router_group_topk
    holds = not groups or chosen == groups or (chosen and config.moe_router_topk // chosen == 2)
    return [(bool(holds), "moe_router_topk = 2 * moe_router_group_topk")]


GROUPS = Row(
    "n_group and topk_group",
    _groups,
    lambda config, settings, made: {
        "n_group": config.moe_router_num_groups or 1,
        "topk_group": config.moe_router_group_topk or 1,
    },
    _group_arguments,
    ("n_group", "topk_group"),
    ("moe_router_num_groups", "moe_router_group_topk"),
    _two_experts_of_a_group,
)

# -- RoPE of latent attention

_SCALES = "mscale and mscale_all_dim other than 0, or mscale 1 with mscale_all_dim 0"


def _latent_rope(theirs: Fields, done: Fields) -> str:
    if (kind := theirs["rope_type"]) not in ("default", "yarn"):
        raise cannot(theirs, "rope_type", "default and yarn")
    if kind == "yarn" and not _same_scale(theirs.get("mscale"), theirs.get("mscale_all_dim")):
        raise cannot(theirs, "mscale", _SCALES)
    return kind


def _scaled_the_same(config: Any) -> Needed:
    if not config.multi_latent_attention:
        return []
    if config.rope_type == "yarn":
        return [(_same_scale(config.mscale, config.mscale_all_dim), _SCALES)]
    # Megatron scales the softmax by mscale_all_dim even without YaRN.
    return [(not config.mscale_all_dim, "no mscale_all_dim without YaRN")]


def _same_scale(mscale: Any, mscale_all_dim: Any) -> bool:
    """Whether transformers and Megatron scale YaRN's cosines the same.

    Both libraries divide the scale for `mscale` by the scale for `mscale_all_dim`. But if one of
    the two values is 0, transformers takes the scale for mscale 1 and does not divide it.
    """
    return bool(mscale and mscale_all_dim) or (mscale == 1 and not mscale_all_dim)


def _of_yarn(name: str, option: str, attribute: str = "") -> Row:
    """The row of a number of YaRN; without YaRN the row reads and writes nothing.

    Args:
        option: Megatron's argument, as `flag` of `number`.
        attribute: as in `number`.
    """
    usual = LATENT_YARN.get(name)
    # transformers' original_max_position_embeddings is by default max_position_embeddings
    row = number(name, option, attribute, usual if name.startswith("beta") else None)

    def read(theirs: Fields, done: Fields) -> Any:
        return row.read(theirs, done) if done["rope_type"] == "yarn" else None

    def write(config: Any, settings: ModelSettings, made: Fields) -> Fields:
        return row.write(config, settings, made) if config.rope_type == "yarn" else {}

    def arguments(value: Any, fields: Fields) -> list[str]:
        # without the usual values, because releases before 0.19 have no --yarn-beta-fast
        return [] if value in (None, usual) else row.arguments(value, fields)

    return replace(row, read=read, write=write, arguments=arguments)


LATENT_ROPE = (
    Row(
        "rope_type",
        _latent_rope,
        lambda config, settings, made: {
            "rope_type": "yarn" if config.rope_type == "yarn" else "default"
        },
        lambda kind, fields: ["--rope-type", "rope" if kind == "default" else kind],
        attributes=("rope_type",),
        needs=_scaled_the_same,
    ),
    _of_yarn("factor", "rotary-scaling-factor"),
    _of_yarn("mscale", "mscale"),
    _of_yarn("mscale_all_dim", "mscale-all-dim"),
    *(_of_yarn(name, f"yarn-{name.replace('_', '-')}", name) for name in LATENT_YARN),
    fixed("attention_factor", None),
    fixed("truncate", None, True),
)

# -- gpt-oss: the size of the attention window, which layers have a window, and the activation

_KINDS = ("full_attention", "sliding_attention")


def _window_layers(theirs: Fields, done: Fields) -> list[int]:
    """For each layer 1 if it has a window, else 0; by default 1, 0, 1, 0 and so on."""
    layers = done["num_hidden_layers"]
    kinds = theirs.get("layer_types") or [_KINDS[1 - layer % 2] for layer in range(layers)]
    if len(kinds) != layers or not {*kinds} <= {*_KINDS}:
        raise cannot(theirs, "layer_types", f"one of {_KINDS} for each layer")
    return [_KINDS.index(kind) for kind in kinds]


def _layer_types(config: Any, settings: ModelSettings, made: Fields) -> Fields:
    from megatron.core.transformer.utils import is_layer_window_attention

    size, skipped = config.window_size, config.window_attn_skip_freq
    numbers = range(1, config.num_layers + 1)
    kinds = [_KINDS[is_layer_window_attention(size, skipped, number)] for number in numbers]
    return {"layer_types": kinds}


def _window_looks_back(config: Any) -> Needed:
    left, right = config.window_size or (0, 1)
    return [(left >= 0 and right == 0, "window_size=N,0")]


def _is_quick_gelu(config: Any) -> Needed:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    return [(config.activation_func is quick_gelu, "quick_gelu (--quick-geglu)")]


WINDOW = Row(
    "sliding_window",
    lambda theirs, done: _whole(theirs, "sliding_window"),
    # Megatron counts the tokens before the current token; transformers counts the current token too
    lambda config, settings, made: {"sliding_window": config.window_size[0] + 1},
    lambda window, fields: ["--window-size", f"{window - 1},0"],
    attributes=("window_size",),
    needs=_window_looks_back,
)
WINDOW_LAYERS = Row(
    "layer_types",
    _window_layers,
    _layer_types,
    lambda layers, fields: ["--window-attn-skip-freq", str(layers).replace(" ", "")],
    attributes=("window_attn_skip_freq",),
)
# x * sigmoid(alpha * x), with the alpha of Megatron's quick_gelu
QUICK_GELU = fixed("swiglu_alpha", 1.702, attributes=("activation_func",), needs=_is_quick_gelu)


def plain_heads(config: Any) -> Needed:
    """The condition that a head has the size hidden_size / num_attention_heads."""
    heads = config.kv_channels * config.num_attention_heads
    return [(heads == config.hidden_size, "kv_channels = hidden_size / num_attention_heads")]


def _whole(theirs: Fields, name: str) -> int:
    """The value of a field that must be a whole number, 1 or more."""
    if type(value := theirs.get(name)) is not int or value < 1:
        raise ValueError(f"{name} is {quoted(value)}; expected a whole number, 1 or more")
    return value
