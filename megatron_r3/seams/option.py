"""Other half of the config patch: refuse what would not replay exactly, when the config is made."""

from __future__ import annotations

from typing import Any

from megatron_r3.replayable import unknown_options
from megatron_r3.seams import deferred
from megatron_r3.seams.fused import settle_fusion

# what any graph may hold. A "local" one of "attn" holds the whole layer, but for those of a hybrid
# model (megatron/core/transformer/transformer_layer.py, create_mcore_cudagraph_manager)
_NO_ROUTER = {"mlp", "mamba", "full_iteration_inference"}


def _captures_router(config: Any) -> bool:
    """Whether a CUDA graph holds the router: its first routes would be baked in.

    What it holds is cuda_graph_modules from 0.18 on, cuda_graph_scope before; 0.15 has two older
    switches beside cuda_graph_impl.
    """
    implementation = getattr(config, "cuda_graph_impl", "none")
    if getattr(config, "enable_cuda_graph", False):
        implementation = "local"
    elif getattr(config, "external_cuda_graph", False):
        implementation = "transformer_engine"
    if implementation == "none":
        return False
    held = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None)
    held = [held] if isinstance(held, str) else held or []
    names = {getattr(module, "name", module) for module in held}
    harmless = _NO_ROUTER | ({"attn"} if implementation == "transformer_engine" else set())
    return not names or bool(names - harmless)


def refusals(config: Any, megatrons: Any = None) -> list[str]:
    """Why this config cannot replay exactly, and what to do; empty if it can.

    Args:
        config: a TransformerConfig, or Megatron's parsed arguments (same names).
        megatrons: the class TransformerConfig, which knows the defaults.
    """
    on = lambda name: bool(getattr(config, name, None))  # noqa: E731
    balancing = getattr(config, "moe_router_load_balancing_type", "none")
    balancing = set(balancing if isinstance(balancing, list) else [balancing])
    num_experts = getattr(config, "num_moe_experts", None) or getattr(config, "num_experts", None)
    reasons = {
        "the model has no MoE layer (num_moe_experts is not set); drop the option": not num_experts,
        "moe_enable_routing_replay is Megatron's own replay and would compete for the router; "
        "choose one": on("moe_enable_routing_replay"),
        "sinkhorn routing does not go through top-k; use aux_loss, seq_aux_loss or none": "sinkhorn"
        in balancing,
        "quantile_balancing does not go through the replayed top-k; use another balancing type or "
        "none": "quantile_balancing" in balancing,
        "moe_expert_capacity_factor drops tokens after the recorded experts were set; unset it": (
            getattr(config, "moe_expert_capacity_factor", None) is not None
        ),
        "moe_expert_rank_capacity_factor drops tokens of a rank that has too many; unset it": (
            getattr(config, "moe_expert_rank_capacity_factor", None) is not None
        ),
        "moe_router_force_load_balancing replaces the logits; unset it": on(
            "moe_router_force_load_balancing"
        ),
        "moe_router_force_biased replaces the logits; unset it": (
            getattr(config, "moe_router_force_biased", None) is not None
        ),
        "a CUDA graph that captures the router would repeat the routes of its first microbatch; "
        "use cuda_graph_impl=transformer_engine for attn alone": _captures_router(config),
        "moe_router_padding_for_quantization routes padding to experts that no rollout recorded; "
        "unset it": on("moe_router_padding_for_quantization") or on("moe_router_padding_for_fp8"),
        "flextron puts a top-k of its own into the routers; unset it": on("flextron"),
        "transformer_impl=inference_optimized is not a training implementation": (
            getattr(config, "transformer_impl", None) == "inference_optimized"
        ),
    }
    unknown = unknown_options(config, megatrons)
    reasons[
        f"{', '.join(unknown)}: nobody here has looked at what this does to a router, so it could "
        "go past the recorded routes; unset it, or report it with your Megatron-LM version to have "
        "it looked at"
    ] = bool(unknown)
    return [reason for reason, holds in reasons.items() if holds]


def _replaced_routing() -> str | None:
    """Who replaced `TopKRouter.routing`, or None: another one never asks for recorded routes."""
    from megatron.core.transformer.moe import router

    module = getattr(router.TopKRouter.routing, "__module__", router.__name__)
    return None if module == router.__name__ else str(module)


def check_config(config: Any) -> None:
    """Refuse a config that would not replay exactly, settle what fusion means.

    Called where a config is made, and again where a router is made with it, since frameworks set
    `config.moe_router_replay` in between. The second call changes nothing.

    Raises:
        ValueError: every reason, a line each.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    found = refusals(config, TransformerConfig)
    if replaced := _replaced_routing():
        found.append(
            f"{replaced} has replaced TopKRouter.routing, and what it put there asks for no "
            "recorded routes; leave that replacement out, or turn moe_router_replay off"
        )
    if found:
        raise ValueError("moe_router_replay: " + "; ".join(found))
    settle_fusion(config)
    deferred.install()
