"""Which Megatron configs can be replayed exactly, and why another one is refused.

`refusals` names what is known to ignore the recorded routes, with the reasons. `KNOWN_NAMES` and
`KNOWN_VALUES` list the routing options that have been read in upstream's source. Any other routing
option or value that is set is refused too: otherwise a hash-routed layer, an offloaded expert or a
megakernel could silently ignore the recorded routes. Whoever adds a release line reads what each of
its new options does to a router, and adds the option to the known names or to the refusals.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

# The fields of TransformerConfig and ModelParallelConfig, in core_v0.16.1 to main of 2026-08-22,
# with names that match `_ABOUT_ROUTING`. Some of them cannot be replayed: those are in `refusals`.
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
# Our own fields, which patches 1 and 101 declare.
_OURS = re.compile("moe_router_replay")
# Without `(?!tron)` "mega" would match use_megatron_fsdp, which has nothing to do with routing.
_ABOUT_ROUTING = re.compile("moe|expert|rout(er|ing)|hash|mega(?!tron)")

# The values of the options that choose between ways to route. Any other value is refused.
KNOWN_VALUES = {
    "moe_router_load_balancing_type": (
        *("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
        *("sinkhorn", "quantile_balancing"),  # known, and refused by `refusals`
    ),
    "moe_router_score_function": ("softmax", "sigmoid", "sqrtsoftplus"),
    "moe_token_dispatcher_type": ("allgather", "alltoall", "flex", "alltoall_seq"),
    # recipes of Megatron-Bridge set None if their dispatcher is not flex
    "moe_flex_dispatcher_backend": ("deepep", "hybridep", "ncclep", None),
    "moe_router_dtype": (None, "fp32", "fp64"),
    # our own options: a misspelt value must not be taken for one of these values
    "moe_router_replay_aux_loss": ("replayed", "live"),
    "moe_router_replay_expert_bias": ("replayed", "live"),
    "moe_router_replay_missing": ("live", "error"),
}


# The modules with CUDA graphs that do not contain the router.
_GRAPHS_WITHOUT_ROUTER = {"mlp", "mamba", "full_iteration_inference"}
# The value of moe_router_replay with which a config that is made in code leaves the router out of
# its CUDA graphs (seams/option.py).
WITHOUT_ROUTER = "graphs_without_router"


def refusals(config: Any, upstream: Any = None) -> list[str]:
    """Why this config cannot be replayed exactly, and what to do; empty if it can be.

    Args:
        config: a TransformerConfig, a framework's subclass of it, or Megatron's parsed arguments
            (the same names, except for `num_experts`).
        upstream: the class TransformerConfig. Its defaults mean "not set" for every option, also
            where `config` is of a subclass with other defaults, or has none (parsed arguments).
    """

    def given(name: str) -> Any:
        return getattr(config, name, None)

    balancing = given("moe_router_load_balancing_type")
    balancing = balancing if isinstance(balancing, list) else [balancing]
    unknown = unknown_options(config, upstream)
    checks = [
        (
            not (given("num_moe_experts") or given("num_experts")),
            "the model has no MoE layer (num_moe_experts is not set); drop the option",
        ),
        (
            "sinkhorn" in balancing,
            "sinkhorn routing does not go through top-k; use aux_loss, seq_aux_loss or none",
        ),
        (
            "quantile_balancing" in balancing,
            "quantile_balancing does not go through the replayed top-k; use another balancing "
            "type or none",
        ),
        (  # 0.0 is a capacity too; below 0 is Megatron's word for none (TransformerConfig)
            (given("moe_expert_capacity_factor") or 0) >= 0
            and given("moe_expert_capacity_factor") is not None,
            "moe_expert_capacity_factor drops tokens after the recorded experts were set; unset it "
            "and moe_pad_expert_input_to_capacity",
        ),
        (
            given("moe_expert_rank_capacity_factor") is not None,
            "moe_expert_rank_capacity_factor drops tokens of a rank that has too many; unset it",
        ),
        (
            given("moe_router_force_load_balancing"),
            "moe_router_force_load_balancing replaces the logits (an option of benchmarks); unset "
            "it",
        ),
        (  # the value 0.0 replaces the logits too
            given("moe_router_force_biased") is not None,
            "moe_router_force_biased replaces the logits; unset it",
        ),
        (
            graphs := _graphs_to_give(config),
            "a CUDA graph that captures the router would repeat the routes of its first "
            f'microbatch; in code set moe_router_replay="{WITHOUT_ROUTER}", or give {graphs}',
        ),
        (given("flextron"), "flextron puts a top-k of its own into the routers; unset it"),
        (
            given("transformer_impl") == "inference_optimized",
            "transformer_impl=inference_optimized does not train; use transformer_engine or local",
        ),
        (
            unknown,
            f"{', '.join(unknown)}: megatron-r3 does not know what this does to a router, and it "
            "could ignore the recorded routes; unset it, or report it with your Megatron-LM "
            "version, so that it can be added",
        ),
    ]
    return [reason for refused, reason in checks if refused]


def modules_without_router(config: Any) -> list[str] | None:
    """The modules that CUDA graphs may still capture once they leave the router out.

    None means that no graph of this config captures the router. An empty list means that no module
    can stay captured. Example: `["attn"]` for the modules attn, moe_router and
    moe_preprocess, and for a whole layer, which the config writes as an empty list.

    Args:
        config: as in `refusals`.
    """
    implementation = getattr(config, "cuda_graph_impl", "none")
    if implementation == "none":
        return None
    modules = getattr(config, "cuda_graph_modules", None) or getattr(
        config, "cuda_graph_scope", None
    )
    modules = [modules] if isinstance(modules, str) else modules
    names = {getattr(module, "name", module) for module in modules or []}
    # A local graph of "attn" captures the whole layer, router included, in all but hybrid models
    # (megatron/core/transformer/transformer_layer.py, create_mcore_cudagraph_manager).
    attention = {"attn"} if implementation == "transformer_engine" else set()
    if names and not names - _GRAPHS_WITHOUT_ROUTER - attention:
        return None
    whole = ["attn"] if names <= {"full", "full_iteration"} else []
    return sorted(names & {"attn", "mlp", "mamba"}) or whole


def field_of_modules(config: Any) -> str:
    """The field with the captured modules: cuda_graph_modules, or cuda_graph_scope before 0.18."""
    return "cuda_graph_modules" if hasattr(config, "cuda_graph_modules") else "cuda_graph_scope"


def _graphs_to_give(config: Any) -> str:
    """The options to give where a CUDA graph captures the router; empty where no graph does."""
    if (modules := modules_without_router(config)) is None:
        return ""
    option = field_of_modules(config).replace("_", "-")
    kept = f"transformer_engine --{option} {' '.join(modules)}" if modules else "none"
    return f"--cuda-graph-impl {kept}"


def unknown_options(config: Any, upstream: Any = None) -> list[str]:
    """The routing options of a config that are set and not known, as `name=value`.

    Args:
        config, upstream: as in `refusals`.
    """
    unknown = {}
    for name, default in {**_defaults(config), **_defaults(upstream)}.items():
        value = getattr(config, name, None)
        if name in KNOWN_NAMES or _OURS.match(name) or not _ABOUT_ROUTING.search(name):
            continue
        if value is not None and value != default:
            unknown[name] = [value]
    for name, known_values in KNOWN_VALUES.items():
        values = getattr(config, name, known_values[0])
        values = values if isinstance(values, list) else [values]
        unknown[name] = [value for value in values if value not in known_values]
    return [f"{name}={value!r:.80}" for name, values in unknown.items() for value in values]


def _defaults(config: Any) -> dict[str, Any]:
    """The default of each field of a dataclass; no defaults for an object of another kind."""
    return {
        field.name: field.default
        if field.default_factory is dataclasses.MISSING
        else field.default_factory()
        for field in (dataclasses.fields(config) if dataclasses.is_dataclass(config) else ())
    }
