"""gpt-oss: biases everywhere, sinks in the attention, windows in every other layer, YaRN.

transformers keeps all experts of a layer in one tensor, with the rows of gate and up taking turns.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_r3.replay.layers import moe_layer_indices
from megatron_r3.weights.families.family_tables import (
    ANY,
    BASE_FLAGS,
    COMMON,
    GROUPED_QUERIES,
    Described,
    Fields,
    Flags,
    Number,
    Rows,
    cannot,
    experts_named,
)
from megatron_r3.weights.families.parts import attention, norms, place
from megatron_r3.weights.family import Mapped, ModelSettings, outside_of_layers, same

_YARN = (
    Number("factor", "rotary-scaling-factor", "yarn_rotary_scaling_factor"),
    Number(
        "original_max_position_embeddings",
        "yarn-original-max-position-embeddings",
        "yarn_original_max_position_embeddings",
    ),
    Number("beta_fast", "yarn-beta-fast", "yarn_beta_fast"),
    Number("beta_slow", "yarn-beta-slow", "yarn_beta_slow"),
)
_FLAGS = """
--quick-geglu --glu-linear-offset 1.0 --softmax-type learnable --position-embedding-type yarn
--no-yarn-correction-range-round-to-int --no-bias-dropout-fusion
""".split()
_KINDS = ("full_attention", "sliding_attention")


class GptOss(Described):
    """The family (`megatron_r3.weights.family.Family`)."""

    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    rows: ClassVar[Rows] = (
        *COMMON,
        *GROUPED_QUERIES,
        *_YARN,
        experts_named("num_local_experts"),
        Number("intermediate_size", "moe-ffn-hidden-size", "moe_ffn_hidden_size"),
        Number("swiglu_limit", "activation-func-clamp-value", "activation_func_clamp_value", 7.0),
    )
    flags: ClassVar[Flags] = (*BASE_FLAGS, *_FLAGS)
    fixed: ClassVar[Fields] = {
        "attention_bias": (True,),
        "swiglu_alpha": (1.702,),  # of Megatron's quick_gelu
        "rope_type": ("yarn",),
        "truncate": (False,),
        "attention_factor": (None,),
        "mscale": (None,),
        "mscale_all_dim": (None,),
        "layer_types": ANY,
    }
    reads: ClassVar[Flags] = ("sliding_window",)
    # the first names that OpenAI gave to num_experts_per_tok, original_max_position_embeddings
    ignores: ClassVar[Flags] = ("experts_per_token", "initial_context_length")
    plain: ClassVar[Fields] = {
        "activation_func": ANY,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": ANY,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "softmax_type": "learnable",
        "window_size": ANY,
        "window_attn_skip_freq": ANY,
        "moe_router_pre_softmax": False,
        "yarn_mscale": 1.0,
        "yarn_mscale_all_dim": 0.0,
        "yarn_correction_range_round_to_int": False,
    }
    settings: ClassVar[Fields] = {"position_embedding_type": "yarn"}

    def own_check(self, config: Any, settings: ModelSettings) -> list[tuple[bool, str]]:
        """See `Described`."""
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        every = config.num_moe_experts and len(moe_layer_indices(config)) == config.num_layers
        left, right = config.window_size or (0, 1)
        return [
            (bool(every), "experts in every layer"),
            (config.activation_func is quick_gelu, "quick_gelu (--quick-geglu)"),
            (left >= 0 and right == 0, "window_size=N,0"),
        ]

    def own_fields(self, config: Any) -> dict[str, Any]:
        """See `Described`."""
        from megatron.core.transformer.utils import is_layer_window_attention

        def has_window(layer: int) -> bool:
            skipped = config.window_attn_skip_freq
            return is_layer_window_attention(config.window_size, skipped, layer + 1)

        return {
            # Megatron counts the tokens in front of a token, transformers counts that token too
            "sliding_window": config.window_size[0] + 1,
            "layer_types": [_KINDS[has_window(layer)] for layer in range(config.num_layers)],
        }

    def own_described(self, theirs: Fields, fields: Fields) -> dict[str, Any]:
        """See `Described`."""
        layers, window = fields["num_hidden_layers"], theirs.get("sliding_window")
        kinds = theirs.get("layer_types") or [_KINDS[1 - layer % 2] for layer in range(layers)]
        if type(window) is not int or window < 1:
            raise ValueError("sliding_window must be a whole number from 1 on")
        if len(kinds) != layers or not {*kinds} <= {*_KINDS}:
            raise cannot(self.model_type, "layer_types", kinds, f"one of {_KINDS} for each layer")
        return {"sliding_window": window, "layer_types": [_KINDS.index(kind) for kind in kinds]}

    def own_arguments(self, fields: Fields) -> list[str]:
        """See `Described`."""
        return [
            *("--ffn-hidden-size", str(fields["intermediate_size"])),  # of no layer
            *("--window-size", f"{fields['sliding_window'] - 1},0"),
            *("--window-attn-skip-freq", str(fields["layer_types"]).replace(" ", "")),
        ]

    def tensors(self, config: Any) -> list[Mapped]:
        """All tensors of the model."""
        mapped = outside_of_layers()
        for layer in range(config.num_layers):
            theirs = f"model.layers.{layer}."
            mapped += [*norms(layer), *attention(config, layer), *_experts(config, layer)]
            for name, ours in _LAYER.items():
                mapped.append(same(theirs + name, place(ours, layer)))
        return mapped


_LAYER = {
    "self_attn.sinks": "self_attention.core_attention.softmax_offset",
    "self_attn.o_proj.bias": "self_attention.linear_proj.bias",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
}


def _experts(config: Any, layer: int) -> list[Mapped]:
    """All experts of a layer: two weights and two biases."""
    found = []
    for kind, end in (("weight", ""), ("bias", "_bias")):
        for linear, theirs, to_hf, to_megatron in (
            ("linear_fc1", "gate_up_proj", _taking_turns, _one_after_another),
            ("linear_fc2", "down_proj", _stacked, _apart),
        ):
            key = f"mlp.experts.experts.{linear}.{kind}"
            places = tuple(place(key, layer, e) for e in range(config.num_moe_experts))
            name = f"model.layers.{layer}.mlp.experts.{theirs}{end}"
            found.append(Mapped(places, (name,), to_hf, to_megatron))
    return found


def _stacked(experts: list[Tensor]) -> list[Tensor]:
    """All experts in one tensor: rows and columns of a weight change their places."""
    return [torch.stack(experts).transpose(1, -1)]


def _apart(stacked: list[Tensor]) -> list[Tensor]:
    return [expert.t() for expert in stacked[0]]


def _taking_turns(experts: list[Tensor]) -> list[Tensor]:
    """As `_stacked`; and Megatron's rows g0 g1 u0 u1 (gate, then up) become g0 u0 g1 u1."""
    return _stacked([torch.stack(e.chunk(2), dim=1).flatten(0, 1) for e in experts])


def _one_after_another(stacked: list[Tensor]) -> list[Tensor]:
    return [torch.cat([rows[0::2], rows[1::2]]) for rows in _apart(stacked)]
