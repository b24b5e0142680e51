"""Which configs can have guests, and why another one is refused."""

from __future__ import annotations

from typing import Any

from megatron_r3.balance.moves import LEAST_TOKENS

_SLOTS = "moe_router_replay_guest_slots"
# Options that guests cannot be with, and why. `_FINE` has the values that are fine; of an option
# that it lacks these are None, 0 and 1.
_REFUSED = {
    "moe_router_replay_dispatch_plan": "guests are planned with the dispatch; leave the plan on",
    "moe_token_dispatcher_type": "the dispatcher {!r} sends tokens to experts in a way of its own; "
    "use alltoall",
    "expert_tensor_parallel_size": "with expert tensor parallelism a rank has a part of each "
    "expert; set expert_tensor_parallel_size to 1",
    "expert_gtp_weight_remat_size": "with expert_tensor_parallel_num_weight_shards no rank has the "
    "whole weights of its experts; leave it out",
    "cuda_graph_impl": "a CUDA graph would repeat the guests of its first micro-batch",
}
_FINE: dict[str, tuple[Any, ...]] = {
    "moe_router_replay_dispatch_plan": (True,),
    "moe_token_dispatcher_type": ("alltoall",),
    "cuda_graph_impl": (None, "none"),
}
# what nobody has run or proved with guests, with a word for each
_NOT_PROVED = {
    "fp8": "in fp8 a weight has scales that do not travel with it",
    "fp4": "in fp4 a weight has scales that do not travel with it",
    "quant_recipe": "quantized weights have scales that do not travel with them",
    "moe_use_legacy_grouped_gemm": "all experts of a rank lie in one weight",
    "moe_single_grouped_weight": "all experts of a rank lie in one weight",
    "moe_use_grouped_tensor": "its padding is made for the number of own experts",
    "moe_apply_probs_on_input": "guests apply the probabilities after the activation",
    "use_transformer_engine_op_fuser": "the fused operations have the weights that they began with",
    "gradient_accumulation_fusion": "it adds gradients to main_grad, past those that come home",
    "overlap_moe_expert_parallel_comm": "its schedule calls the parts of a layer in another order",
    "delay_wgrad_compute": "it computes gradients of weights after they would have come home",
    "overlap_dispatch_backward_with_experts_wgrad": "it computes gradients of weights later",
    "cpu_offloading": "it takes what a layer keeps for its backward pass",
    "fine_grained_activation_offloading": "it takes what a layer keeps for its backward pass",
    "add_bias_linear": "experts with a bias return it apart from their output",
    "use_megatron_fsdp": "no rank has the whole weights of its experts",
    "use_torch_fsdp2": "no rank has the whole weights of its experts",
}


def guest_refusals(config: Any) -> list[str]:
    """Why this config cannot have guests, and what to do; empty if it can, or asks for none.

    Args:
        config: a TransformerConfig, or Megatron's parsed arguments.
    """

    def given(name: str) -> Any:
        return getattr(config, name, None)

    slots = given(_SLOTS) or 0
    domain, tokens = (given(f"moe_router_replay_guest_{name}") for name in ("domain", "tokens"))
    if not slots:
        alone = {"domain": domain is not None, "tokens": tokens not in (None, LEAST_TOKENS)}
        return [
            f"moe_router_replay_guest_{name} does nothing without {_SLOTS}; give both, or none"
            for name, is_given in alone.items()
            if is_given
        ]
    reasons = _wrong_numbers(slots, domain, tokens, given("expert_model_parallel_size") or 1)
    reasons += [
        f"{_SLOTS}: {why.format(given(name))}"
        for name, why in _REFUSED.items()
        if given(name) not in _FINE.get(name, (None, 0, 1))
    ]
    return reasons + [
        f"{_SLOTS} is not proved with {name}: {why}; turn one of the two off"
        for name, why in _NOT_PROVED.items()
        if given(name)
    ]


def _wrong_numbers(slots: int, domain: int | None, tokens: int | None, ranks: int) -> list[str]:
    checks = [
        (slots < 0, f"{_SLOTS} {slots}: it must be 0 or more"),
        (
            tokens is not None and tokens < 1,
            f"moe_router_replay_guest_tokens {tokens}: it must be 1 or more",
        ),
        (
            ranks == 1,
            f"{_SLOTS}: one rank has all experts (expert_model_parallel_size is 1), so no load can "
            "be shared out; leave it out",
        ),
        (
            domain is not None and domain < 2,
            f"moe_router_replay_guest_domain {domain}: a guest is on another rank than its expert; "
            "give 2 or more",
        ),
        (
            domain is not None and domain > 1 and ranks > domain and ranks % domain > 0,
            f"moe_router_replay_guest_domain {domain}: {ranks} ranks are no whole number of "
            f"domains; give a divisor of {ranks}",
        ),
    ]
    return [reason for refused, reason in checks if refused]
