"""Which configs can have guests, and why other configs are refused."""

from __future__ import annotations

from typing import Any

from megatron_r3.balance.moves import LEAST_TOKENS

_SLOTS = "moe_router_replay_guest_slots"
# Options that guests do not work with, and why. `_FINE` has the values that are allowed; for an
# option that is not in `_FINE` these are None, 0 and 1.
_REFUSED = {
    "moe_router_replay_dispatch_plan": "guests belong to the dispatch plan; leave the plan on",
    "moe_token_dispatcher_type": "with the dispatcher {!r} tokens cannot be sent to guests; "
    "use alltoall",
    "expert_tensor_parallel_size": "with expert tensor parallelism a rank has a part of each "
    "expert; set expert_tensor_parallel_size to 1",
    "expert_gtp_weight_remat_size": "with expert_tensor_parallel_num_weight_shards no rank has the "
    "whole weights of its experts; leave it out",
    "cuda_graph_impl": "a CUDA graph would repeat its first micro-batch's guests; leave it out",
}
_FINE: dict[str, tuple[Any, ...]] = {
    "moe_router_replay_dispatch_plan": (True,),
    "moe_token_dispatcher_type": ("alltoall",),
    "cuda_graph_impl": (None, "none"),
}
# options that were not run or proved with guests, and what stands against each
_NOT_PROVED = {
    "fp8": "in fp8 a weight has scales that do not travel with it",
    "fp4": "in fp4 a weight has scales that do not travel with it",
    "moe_router_padding_for_quantization": "its padding is planned by expert, not by place",
    "quant_recipe": "quantized weights have scales that do not travel with them",
    "moe_use_legacy_grouped_gemm": "all experts of a rank lie in one weight",
    "moe_single_grouped_weight": "all experts of a rank lie in one weight",
    "moe_use_grouped_tensor": "it pads for the number of own experts",
    "moe_apply_probs_on_input": "guests apply the probabilities after the activation",
    "use_transformer_engine_op_fuser": "fused operations keep the weights of their first call",
    "gradient_accumulation_fusion": "it bypasses autograd, which sends the gradients of guests",
    "overlap_moe_expert_parallel_comm": "its schedule calls the parts of a layer in another order",
    "delay_wgrad_compute": "it computes gradients of weights too late to send those of guests",
    "overlap_dispatch_backward_with_experts_wgrad": "it computes gradients of weights too late",
    "cpu_offloading": "it changes how tensors are saved for backward",
    "fine_grained_activation_offloading": "it changes how tensors are saved for backward",
    "add_bias_linear": "experts with a bias return it apart from their output",
    "use_megatron_fsdp": "no rank has the whole weights of its experts",
    "use_torch_fsdp2": "no rank has the whole weights of its experts",
}


def guest_refusals(config: Any) -> list[str]:
    """Why this config's options for guests are refused, and what to do; empty if none is refused.

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
            "be shared out; leave the option out",
        ),
        (
            domain is not None and domain < 2,
            f"moe_router_replay_guest_domain {domain}: a guest is on another rank than its expert; "
            "give 2 or more",
        ),
        (
            domain is not None and domain > 1 and ranks > domain and ranks % domain > 0,
            f"moe_router_replay_guest_domain {domain}: {ranks} ranks cannot be divided into "
            f"domains of that size; give a divisor of {ranks}",
        ),
    ]
    return [reason for refused, reason in checks if refused]
