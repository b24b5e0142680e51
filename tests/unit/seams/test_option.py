"""What would not replay exactly is refused, with its reason."""

from types import SimpleNamespace

import pytest

from megatron_r3.seams.option import refusals
from megatron_r3.seams.pretrain import _check_options
from megatron_r3.training.layers import moe_layer_indices

GOOD = {"num_moe_experts": 8, "moe_router_load_balancing_type": "aux_loss"}

WRONG = {
    "no MoE layer": {"num_moe_experts": None},
    "moe_enable_routing_replay": {"moe_enable_routing_replay": True},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "quantile_balancing": {"moe_router_load_balancing_type": ["quantile_balancing"]},
    "capacity_factor": {"moe_expert_capacity_factor": 0.0},
    "expert_rank_capacity_factor": {"moe_expert_rank_capacity_factor": 1.0},
    "force_load_balancing": {"moe_router_force_load_balancing": True},
    "force_biased": {"moe_router_force_biased": 0.0},
    "CUDA graph": {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "moe_router"]},
    "padding_for_quantization": {"moe_router_padding_for_quantization": True},
    "flextron": {"flextron": True},
    "inference_optimized": {"transformer_impl": "inference_optimized"},
}


def test_an_ordinary_config_is_accepted():
    assert refusals(SimpleNamespace(**GOOD)) == []


@pytest.mark.parametrize("reason", WRONG)
def test_refused_with_the_reason(reason):
    found = refusals(SimpleNamespace(**{**GOOD, **WRONG[reason]}))
    assert len(found) == 1
    assert reason in found[0]


def test_every_refusal_is_in_the_list():
    everything = {name: value for wrong in WRONG.values() for name, value in wrong.items()}
    everything["moe_router_load_balancing_type"] = ["sinkhorn", "quantile_balancing"]
    assert len(refusals(SimpleNamespace(**everything))) == len(WRONG)


@pytest.mark.parametrize(
    "graph",
    [
        {"cuda_graph_modules": []},
        {"cuda_graph_impl": "full_iteration"},
        {"cuda_graph_modules": ["attn"]},  # of GPT layers it holds the MoE part too
        {"cuda_graph_scope": ["attn"]},
    ],
)
def test_whole_layer_graphs_are_refused(graph):
    assert refusals(SimpleNamespace(**GOOD, **{"cuda_graph_impl": "local", **graph}))


@pytest.mark.parametrize(
    "graph",
    [
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]},  # 0.16, 0.17
        {"cuda_graph_impl": "local", "cuda_graph_modules": ["mlp", "mamba"]},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn"},  # 0.15
        {"external_cuda_graph": True, "cuda_graph_scope": "attn"},
    ],
)
def test_a_graph_without_a_router_is_accepted(graph):
    assert refusals(SimpleNamespace(**GOOD, **graph)) == []


@pytest.mark.parametrize(
    "graph",
    [
        {"cuda_graph_impl": "local", "cuda_graph_scope": ["moe_router"]},
        {"cuda_graph_impl": "local", "cuda_graph_scope": "attn"},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "full"},
        {"enable_cuda_graph": True, "cuda_graph_scope": "attn"},
        {"external_cuda_graph": True, "cuda_graph_scope": "full"},
    ],
)
def test_graphs_of_older_lines_that_hold_the_router_are_refused(graph):
    assert refusals(SimpleNamespace(**GOOD, **graph))


@pytest.mark.parametrize(
    ("frequency", "layers"), [(1, (0, 1, 2, 3, 4)), (2, (0, 2, 4)), ([0, 1, 1, 0, 1], (1, 2, 4))]
)
def test_moe_layers_follow_megatrons_rule(frequency, layers):
    assert moe_layer_indices(SimpleNamespace(num_layers=5, moe_layer_freq=frequency)) == layers


HYBRID = ["hybrid_layer_pattern", "hybrid_override_pattern"]  # from 0.17 on, before


@pytest.mark.parametrize("name", HYBRID)
def test_moe_layers_of_a_hybrid_model_are_those_of_its_pattern(name):
    config = SimpleNamespace(num_layers=6, moe_layer_freq=1, **{name: "*E|M-|EE/*E/*E"})
    assert moe_layer_indices(config) == (1, 4, 5)


def refused_with_rollouts(**more):
    args = {"rollouts": ["store"], "rollouts_clip_eps": 0.2, "rollouts_pack": False, **more}
    with pytest.raises(ValueError) as refusal:  # before the store is looked at
        _check_options(SimpleNamespace(micro_batch_size=1, **args))
    return str(refusal.value)


@pytest.mark.parametrize("name", HYBRID)
def test_a_pack_does_not_go_through_recurrent_layers(name):
    told = refused_with_rollouts(rollouts_pack=True, **{name: "M*M*"})
    assert "--rollouts-pack with the hybrid pattern M*M*" in told


def test_legacy_models_have_routers_that_would_not_ask():
    told = refused_with_rollouts(use_legacy_models=True)
    assert "not together with --use-legacy-models" in told


def test_checkpoints_that_cannot_say_what_was_used():
    told = refused_with_rollouts(override_ckpt_iteration=7)
    assert "not together with --override-ckpt-iteration: the checkpoint's own iteration" in told
    told = refused_with_rollouts(non_persistent_ckpt_type="local")
    assert "not together with --non-persistent-ckpt-type local" in told
