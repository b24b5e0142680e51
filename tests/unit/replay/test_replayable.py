"""What cannot be replayed exactly is refused: what is known, with its reason; the rest, by name."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_r3.replay.replayable import refusals, unknown_options

GOOD: dict[str, Any] = {"num_moe_experts": 8, "moe_router_load_balancing_type": "aux_loss"}

WRONG: dict[str, dict[str, Any]] = {
    "no MoE layer": {"num_moe_experts": None},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "quantile_balancing": {"moe_router_load_balancing_type": ["quantile_balancing"]},
    "capacity_factor": {"moe_expert_capacity_factor": 0.0},
    "expert_rank_capacity_factor": {"moe_expert_rank_capacity_factor": 1.0},
    "force_load_balancing": {"moe_router_force_load_balancing": True},
    "force_biased": {"moe_router_force_biased": 0.0},
    "CUDA graph": {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "moe_router"]},
    "flextron": {"flextron": True},
    "inference_optimized": {"transformer_impl": "inference_optimized"},
}


def test_an_ordinary_config_is_accepted() -> None:
    assert refusals(SimpleNamespace(**GOOD)) == []
    live = {"moe_router_replay_aux_loss": "live", "moe_router_replay_missing": "error"}
    assert refusals(SimpleNamespace(**GOOD, **live)) == []
    assert refusals(SimpleNamespace(**GOOD, moe_flex_dispatcher_backend=None)) == []
    # Megatron's word for none: TransformerConfig makes None of it
    assert refusals(SimpleNamespace(**GOOD, moe_expert_capacity_factor=-1.0)) == []


@pytest.mark.parametrize("name", ["aux_loss", "expert_bias", "missing"])
def test_a_misspelt_choice_is_refused(name: str) -> None:
    option = f"moe_router_replay_{name}"
    (refusal,) = refusals(SimpleNamespace(**GOOD, **{option: "lives"}))
    assert refusal.startswith(f"{option}='lives'")


@pytest.mark.parametrize("reason", WRONG)
def test_refused_with_the_reason(reason: str) -> None:
    (refusal,) = refusals(SimpleNamespace(**{**GOOD, **WRONG[reason]}))
    assert reason in refusal


def test_every_refusal_is_in_the_list() -> None:
    everything = {name: value for wrong in WRONG.values() for name, value in wrong.items()}
    everything["moe_router_load_balancing_type"] = ["sinkhorn", "quantile_balancing"]
    assert len(refusals(SimpleNamespace(**everything))) == len(WRONG)


@pytest.mark.parametrize(
    ("impl", "graph", "holds_router"),
    [
        ("local", {"cuda_graph_modules": []}, True),
        ("full_iteration", {}, True),
        (
            "local",
            {"cuda_graph_modules": ["attn"]},
            True,
        ),  # of GPT layers it holds the MoE part too
        ("local", {"cuda_graph_scope": ["attn"]}, True),  # 0.16, 0.17
        ("local", {"cuda_graph_scope": ["moe_router"]}, True),
        ("transformer_engine", {"cuda_graph_scope": ["full"]}, True),
        ("transformer_engine", {"cuda_graph_modules": ["attn"]}, False),
        ("transformer_engine", {"cuda_graph_scope": ["attn"]}, False),
        ("local", {"cuda_graph_modules": ["mlp", "mamba"]}, False),
    ],
)
def test_a_graph_is_refused_if_it_holds_the_router(impl, graph, holds_router):
    told = refusals(SimpleNamespace(**GOOD, cuda_graph_impl=impl, **graph))
    assert len(told) == holds_router
    assert all("a CUDA graph that captures the router" in refusal for refusal in told)


@pytest.mark.parametrize(
    ("name", "captured", "kept"),
    [
        ("modules", ["attn", "moe_router", "moe_preprocess"], "attn"),  # a recipe of Qwen3-30B-A3B
        ("modules", ["mamba", "moe", "attn"], "attn mamba"),
        ("modules", [], "attn"),
        ("modules", ["attn", "full_iteration_inference", "moe"], "attn"),
        ("scope", ["moe_router"], ""),
    ],
)
def test_the_graphs_that_remain_are_ready_to_be_given(name, captured, kept):
    graphs = {"cuda_graph_impl": "transformer_engine", f"cuda_graph_{name}": captured}
    (refusal,) = refusals(SimpleNamespace(**GOOD, **graphs))
    if kept:
        kept_graphs = f"transformer_engine --cuda-graph-{name} {kept}"
        graphs[f"cuda_graph_{name}"] = kept.split()
    else:
        kept_graphs = graphs["cuda_graph_impl"] = "none"
    assert refusal.endswith(f"give --cuda-graph-impl {kept_graphs}")
    assert refusals(SimpleNamespace(**GOOD, **graphs)) == []


@dataclass
class Newer:
    """A config of a Megatron-LM that nobody here has seen."""

    num_moe_experts: int = 8
    moe_router_load_balancing_type: Any = "aux_loss"
    moe_router_score_function: str = "softmax"
    moe_token_dispatcher_type: str = "alltoall"
    moe_router_topk: int = 2
    moe_n_hash_layers: int = 0
    offload_cold_experts: bool = False
    use_mega_kernel: bool = False
    routing_scheme: str | None = None
    hidden_size: int = 8
    use_megatron_fsdp: bool = False
    moe_layer_list: list[int] = field(default_factory=list)


NEW = {
    "moe_n_hash_layers=3": {"moe_n_hash_layers": 3},
    "offload_cold_experts=True": {"offload_cold_experts": True},
    "use_mega_kernel=True": {"use_mega_kernel": True},
    "routing_scheme='hash'": {"routing_scheme": "hash"},
    "moe_layer_list=[1]": {"moe_layer_list": [1]},
    "moe_router_score_function='tanh'": {"moe_router_score_function": "tanh"},
    "moe_token_dispatcher_type='rdma'": {"moe_token_dispatcher_type": "rdma"},
    "moe_router_load_balancing_type='new'": {"moe_router_load_balancing_type": ["none", "new"]},
}


@pytest.mark.parametrize("name", NEW)
def test_an_option_that_nobody_has_looked_at_is_refused_by_name(name: str) -> None:
    (reason,) = refusals(Newer(**NEW[name]))
    assert reason.startswith(f"{name}: megatron-r3 does not know what this does to a router")
    assert "report it with your Megatron-LM version" in reason


def test_known_options_and_those_about_something_else_are_accepted() -> None:
    assert refusals(Newer()) == []
    assert refusals(Newer(moe_router_topk=4, hidden_size=16, use_megatron_fsdp=True)) == []


def test_arguments_are_compared_with_the_defaults_of_the_config() -> None:
    given = SimpleNamespace(**{f.name: getattr(Newer(), f.name) for f in fields(Newer)})
    assert unknown_options(given, Newer) == []
    given.moe_n_hash_layers = 3
    assert unknown_options(given, Newer) == ["moe_n_hash_layers=3"]
    assert unknown_options(given) == []  # control: without the defaults nobody can tell


def test_a_framework_cannot_turn_an_unknown_option_on_by_its_own_default() -> None:
    @dataclass
    class Framework(Newer):
        moe_n_hash_layers: int = 3

    assert unknown_options(Framework(), Newer) == ["moe_n_hash_layers=3"]
    assert unknown_options(Framework(moe_n_hash_layers=0), Newer) == []
