"""What guests are refused with; that a tree asks: tests/functional/test_bad_input.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_r3.balance.guest_refusals import guest_refusals
from megatron_r3.balance.moves import LEAST_TOKENS
from megatron_r3.train.option_table import BY_NAME

GUESTS: dict[str, Any] = {
    "moe_router_replay_dispatch_plan": True,
    "moe_router_replay_guest_slots": 2,
    "moe_router_replay_guest_tokens": 1024,
    "moe_token_dispatcher_type": "alltoall",
    "expert_model_parallel_size": 8,
    "cuda_graph_impl": "none",
}
WRONG_GUESTS: dict[str, dict[str, Any]] = {
    "guest_slots -1: it must be 0 or more": {"moe_router_replay_guest_slots": -1},
    "guest_tokens 0: it must be 1 or more": {"moe_router_replay_guest_tokens": 0},
    "one rank has all experts": {"expert_model_parallel_size": 1},
    "guest_domain 1: a guest is on another rank": {"moe_router_replay_guest_domain": 1},
    "guest_domain 3: 8 ranks cannot be divided": {"moe_router_replay_guest_domain": 3},
    "leave the plan on": {"moe_router_replay_dispatch_plan": False},
    "with the dispatcher 'flex' tokens cannot": {"moe_token_dispatcher_type": "flex"},
    "expert tensor parallelism": {"expert_tensor_parallel_size": 2},
    "guest_domain does nothing without moe_router_replay_guest_slots": {
        "moe_router_replay_guest_slots": 0,
        "moe_router_replay_guest_domain": 4,
    },
    "guest_tokens does nothing without moe_router_replay_guest_slots": {
        "moe_router_replay_guest_slots": 0,
        "moe_router_replay_guest_tokens": 512,
    },
    "a CUDA graph would repeat": {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": ["attn"],
    },
    "no rank has the whole weights of its experts": {"expert_gtp_weight_remat_size": 2},
    **{
        f"not proved with {name}: ": {name: True}
        for name in (
            *("fp8", "fp4", "quant_recipe", "gradient_accumulation_fusion", "add_bias_linear"),
            *("moe_use_legacy_grouped_gemm", "use_transformer_engine_op_fuser"),
            *("moe_single_grouped_weight", "moe_use_grouped_tensor", "moe_apply_probs_on_input"),
            *("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "cpu_offloading"),
            *("overlap_dispatch_backward_with_experts_wgrad", "use_megatron_fsdp"),
            *("fine_grained_activation_offloading", "use_torch_fsdp2"),
        )
    },
}


def test_guests_are_accepted() -> None:
    assert BY_NAME["moe_router_replay_guest_tokens"].default == LEAST_TOKENS
    assert guest_refusals(SimpleNamespace(**GUESTS)) == []
    assert guest_refusals(SimpleNamespace(**GUESTS, moe_grouped_gemm=True)) == []
    for domain in (4, 8, 16):
        assert (
            guest_refusals(SimpleNamespace(**GUESTS, moe_router_replay_guest_domain=domain)) == []
        )


@pytest.mark.parametrize("reason", WRONG_GUESTS)
def test_guests_are_refused_with_the_reason(reason: str) -> None:
    (refusal,) = guest_refusals(SimpleNamespace(**{**GUESTS, **WRONG_GUESTS[reason]}))
    assert reason in refusal
