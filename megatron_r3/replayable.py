"""The routing options of Megatron-LM that were looked at: the list is closed.

Whoever adds a release line reads what its new options do to a router, and adds them here, or to the
refusals of `config.py`. Until then an option that is set is refused: a hash-routed layer, an expert
that is offloaded or a megakernel may go past the recorded routes without a word.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

# fields of TransformerConfig and ModelParallelConfig, of core_v0.15.3 to main of 2026-08-22, whose
# names say that they have to do with routing; what cannot be replayed is refused by config.py
KNOWN_NAMES = frozenset(
    """
    expert_gtp_weight_remat_size expert_model_parallel_size
    expert_tensor_parallel_num_weight_shards expert_tensor_parallel_size
    inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
    moe_apply_probs_on_input moe_aux_loss_coeff moe_combine_bwd_dtype moe_deepep_num_sms
    moe_dispatch_fwd_dtype moe_enable_deepep moe_enable_routing_replay
    moe_expert_capacity_factor moe_expert_rank_capacity_factor moe_extended_tp
    moe_ffn_hidden_size moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms
    moe_grad_scale_func moe_grouped_gemm moe_hybridep_num_blocks_permute
    moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms
    moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs
    moe_input_jitter_eps moe_latent_size moe_layer_freq moe_layer_recompute
    moe_mlp_glu_interleave_size moe_ncclep_static_shape moe_ncclep_zero_copy
    moe_pad_expert_input_to_capacity moe_pad_experts_for_cuda_graph_inference
    moe_paged_stash moe_paged_stash_buffer_size_factor_cpu
    moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size moe_per_layer_logging
    moe_permute_fusion moe_permute_fusion_into_hybridep moe_router_bias_update_rate
    moe_router_dtype moe_router_enable_expert_bias moe_router_force_biased
    moe_router_force_load_balancing moe_router_fusion moe_router_group_topk
    moe_router_load_balancing_type moe_router_num_groups moe_router_padding_for_fp8
    moe_router_padding_for_quantization moe_router_pre_softmax
    moe_router_quantile_balancing_ema moe_router_score_function moe_router_topk
    moe_router_topk_limited_devices moe_router_topk_scaling_factor moe_shared_expert_gate
    moe_shared_expert_glu_interleave_size moe_shared_expert_intermediate_size
    moe_shared_expert_overlap moe_single_grouped_bias moe_single_grouped_weight
    moe_token_dispatcher_type moe_token_drop_policy moe_token_dropping
    moe_use_grouped_tensor moe_use_legacy_grouped_gemm moe_z_loss_coeff num_moe_experts
    overlap_dispatch_backward_with_experts_wgrad overlap_moe_expert_parallel_comm
    use_grouped_gemm_for_shared_expert
    """.split()
)
# our own, which the patches add
_OURS = re.compile("moe_router_replay")
_ABOUT_ROUTING = re.compile("moe|expert|rout(er|ing)|hash|mega(?!tron)")

# the values of those that choose between ways to route
KNOWN_VALUES = {
    "moe_router_load_balancing_type": (
        *("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
        *("sinkhorn", "quantile_balancing"),  # refused by config.py, with their own reasons
    ),
    "moe_router_score_function": ("softmax", "sigmoid", "sqrtsoftplus"),
    "moe_token_dispatcher_type": ("allgather", "alltoall", "flex", "alltoall_seq"),
    "moe_flex_dispatcher_backend": ("deepep", "hybridep", "ncclep"),
    "moe_router_dtype": (None, "fp32", "fp64"),
}


def unknown_options(config: Any, megatrons: Any = None) -> list[str]:
    """The options about routing that are set here and that nobody has looked at, as `name=value`.

    Args:
        config: a TransformerConfig or a framework's subclass of it, or Megatron's parsed arguments.
        megatrons: the class TransformerConfig: its defaults are those that mean "not set", also
            where a subclass has others.
    """
    defaults = {**_defaults(config), **_defaults(megatrons)}
    found = []
    for name, default in defaults.items():
        value = getattr(config, name, None)
        if name in KNOWN_NAMES or _OURS.match(name) or not _ABOUT_ROUTING.search(name):
            continue
        if value is not None and value != default:
            found.append(f"{name}={value!r:.80}")
    for name, known_values in KNOWN_VALUES.items():
        given = getattr(config, name, known_values[0])
        for value in given if isinstance(given, list) else [given]:
            if value not in known_values:
                found.append(f"{name}={value!r:.80}")
    return found


def _defaults(config: Any) -> dict[str, Any]:
    """Each field's default; none for what is no dataclass."""
    return {
        field.name: field.default
        if field.default_factory is dataclasses.MISSING
        else field.default_factory()
        for field in (dataclasses.fields(config) if dataclasses.is_dataclass(config) else ())
    }
