"""Which keys of a checkpoint Transformer Engine's layers ask for."""

from __future__ import annotations

from dataclasses import dataclass

from proof.gpu.training_load import asked


@dataclass
class Sharded:
    key: str


LOCAL = {
    "decoder.layers.mlp.linear_fc1.layer_norm_weight",
    "decoder.layers.self_attention.linear_qkv._extra_state",
    "decoder.layers.mlp.router.weight",
}
OF_TE = {
    "decoder.layers.0.pre_mlp_layernorm.weight": "decoder.layers.pre_mlp_layernorm.weight",
    "decoder.layers.0.pre_mlp_layernorm._extra_state": (
        "decoder.layers.pre_mlp_layernorm._extra_state"
    ),
    "decoder.layers.0.self_attention.linear_qkv._extra_state": (
        "decoder.layers.self_attention.linear_qkv._extra_state"
    ),
    "decoder.layers.0.mlp.experts.linear_fc1._extra_state7": (
        "decoder.layers.mlp.experts.linear_fc1._extra_state"
    ),
    "decoder.layers.0.mlp.router.weight": "decoder.layers.mlp.router.weight",
}


def keys(named: dict[str, str], saved: set[str]) -> dict[str, str]:
    state = {name: Sharded(key) for name, key in named.items()}
    return {name: item.key for name, item in asked(state, saved).items()}


def test_the_norm_has_its_local_name_and_scales_are_left_out() -> None:
    assert keys(OF_TE, LOCAL) == {
        "decoder.layers.0.pre_mlp_layernorm.weight": (
            "decoder.layers.mlp.linear_fc1.layer_norm_weight"
        ),
        "decoder.layers.0.mlp.router.weight": "decoder.layers.mlp.router.weight",
    }


def test_a_checkpoint_with_the_models_own_names_is_asked_as_ever() -> None:
    assert keys(OF_TE, {*OF_TE.values()}) == OF_TE


def test_a_weight_that_the_checkpoint_lacks_is_still_asked_for() -> None:
    lacking = LOCAL - {"decoder.layers.mlp.router.weight"}
    assert "decoder.layers.0.mlp.router.weight" in keys(OF_TE, lacking)
    no_norm = LOCAL - {"decoder.layers.mlp.linear_fc1.layer_norm_weight"}
    name = "decoder.layers.0.pre_mlp_layernorm.weight"
    assert keys(OF_TE, no_norm)[name] == OF_TE[name]
