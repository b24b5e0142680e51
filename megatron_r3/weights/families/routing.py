"""The MoE layers of DeepSeek-V3 and its heirs: sigmoid scores, a bias, groups, a scale."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from megatron_r3.replay.layers import moe_layer_indices
from megatron_r3.weights.families.family_tables import (
    ANY,
    COMMON,
    DENSE_SIZE,
    EXPERT_SIZE,
    PLAIN_FLAGS,
    Described,
    Fields,
    Flags,
    Number,
    Rows,
    cannot,
    experts_named,
)
from megatron_r3.weights.families.parts import correction_bias, dense, experts, shared_experts
from megatron_r3.weights.family import Mapped, ModelSettings

_SCALE = Number(
    "routed_scaling_factor",
    "moe-router-topk-scaling-factor",
    "moe_router_topk_scaling_factor",
    1.0,
)
# transformers computes these routers in float32. Unless its rate is 0, Megatron moves the bias in
# every step, by how many tokens each expert had.
_FLAGS = """
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32
--moe-router-bias-update-rate 0
""".split()
# what `described` calls them: messages name the fields
_GROUPS = "n_group and topk_group"
_SHARED = "n_shared_experts * moe_intermediate_size"


class SigmoidRouted(Described):
    """A family whose first layers are dense, and whose other layers route as DeepSeek-V3 does."""

    rows: ClassVar[Rows] = (
        *COMMON,
        experts_named("n_routed_experts"),
        EXPERT_SIZE,
        DENSE_SIZE,
        _SCALE,
    )
    flags: ClassVar[Flags] = (*PLAIN_FLAGS, *_FLAGS)
    fixed: ClassVar[Fields] = {"scoring_func": (None, "sigmoid"), "topk_method": (None, "noaux_tc")}
    reads: ClassVar[Flags] = (
        *("first_k_dense_replace", "moe_layer_freq", "n_shared_experts", "n_group", "topk_group"),
        "norm_topk_prob",
    )
    ignores: ClassVar[Flags] = (
        *("num_nextn_predict_layers", "num_mtp_layers"),  # see is_left_out
        *("ep_size", "pretraining_tp", "seq_aux", "aux_loss_alpha"),
    )
    plain: ClassVar[Fields] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": ANY,
        "moe_router_group_topk": ANY,
        "moe_router_topk_scaling_factor": ANY,
        "moe_shared_expert_intermediate_size": ANY,
    }

    def own_check(self, config: Any, settings: ModelSettings) -> list[tuple[bool, str]]:
        """See `Described`."""
        if config.num_moe_experts is None:
            return []
        moe = moe_layer_indices(config)
        shared = config.moe_shared_expert_intermediate_size or 0
        groups, chosen = config.moe_router_num_groups, config.moe_router_group_topk
        return [
            (moe == tuple(range(config.num_layers))[-len(moe) :], "experts in all later layers"),
            (shared > 0 and shared % config.moe_ffn_hidden_size == 0, "whole shared experts"),
            (
                not groups or chosen == groups or config.moe_router_topk // chosen == 2,
                "moe_router_topk = 2 * moe_router_group_topk",
            ),
        ]

    def own_fields(self, config: Any) -> dict[str, Any]:
        """See `Described`."""
        shared = config.moe_shared_expert_intermediate_size
        return {
            "first_k_dense_replace": config.num_layers - len(moe_layer_indices(config)),
            "moe_layer_freq": 1,
            "n_shared_experts": shared // config.moe_ffn_hidden_size,
            "n_group": config.moe_router_num_groups or 1,
            "topk_group": config.moe_router_group_topk or 1,
            "norm_topk_prob": config.moe_router_topk > 1,
            "num_nextn_predict_layers": 0,
        }

    def own_described(self, theirs: Fields, fields: Fields) -> dict[str, Any]:
        """See `Described`."""
        for name in ("n_group", "topk_group", "n_shared_experts"):
            if type(theirs.get(name)) is not int or theirs[name] < 1:
                raise ValueError(f"{name} must be a whole number from 1 on")
        topk, chosen = fields["num_experts_per_tok"], theirs["topk_group"]
        # Megatron divides the weights of a token by their sum if there are several of them.
        if (norm := theirs.get("norm_topk_prob", True)) != (topk > 1):
            raise cannot(self.model_type, "norm_topk_prob", norm, f"{topk > 1} with {topk} experts")
        limited = chosen < theirs["n_group"]
        # A group is as good as the sum of its best experts: transformers takes the best two,
        # Megatron (group_limited_topk in moe_utils.py) the best topk // topk_group.
        if limited and topk // chosen != 2:
            can = (
                f"{topk // 2} with num_experts_per_tok {topk} (or {theirs['n_group']}, all groups)"
            )
            raise cannot(self.model_type, "topk_group", chosen, can)
        return {
            _GROUPS: (theirs["n_group"], chosen) if limited else None,
            _SHARED: theirs["n_shared_experts"] * fields[EXPERT_SIZE.name],
        }

    def own_arguments(self, fields: Fields) -> list[str]:
        """See `Described`."""
        found = ["--moe-shared-expert-intermediate-size", str(fields[_SHARED])]
        if fields[_GROUPS] is not None:
            groups, chosen = fields[_GROUPS]
            found += ["--moe-router-num-groups", str(groups)]
            found += ["--moe-router-group-topk", str(chosen)]
        return found

    def is_left_out(self, name: str, config: Any) -> bool:
        """See `Family`: the layers for prediction follow on the last layer."""
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return layer is not None and int(layer[1]) >= config.num_layers

    def mlp(self, config: Any, layer: int) -> list[Mapped]:
        """The tensors of a layer's MLP: dense, or router, experts and shared experts."""
        if layer not in moe_layer_indices(config):
            return dense(layer)
        routed = [*experts(config, layer), correction_bias(layer)]
        return [*routed, *shared_experts(layer, "shared_experts")]
