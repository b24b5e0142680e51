"""Which keys of a checkpoint Transformer Engine's layers ask for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from proof.gpu.training_load import asked

LAYERS = "decoder.layers."
ROUTER, QKV_SCALES = f"{LAYERS}mlp.router.weight", f"{LAYERS}self_attention.linear_qkv._extra_state"
LOCAL_NORM, NORM = f"{LAYERS}mlp.linear_fc1.layer_norm_weight", f"{LAYERS}pre_mlp_layernorm.weight"
NORM_SCALES = f"{LAYERS}pre_mlp_layernorm._extra_state"
EXPERT_SCALES = f"{LAYERS}mlp.experts.linear_fc1._extra_state"
LOCAL = {LOCAL_NORM, QKV_SCALES, ROUTER}
OF_TE = {
    "0.pre_mlp_layernorm.weight": NORM,
    "0.pre_mlp_layernorm._extra_state": NORM_SCALES,
    "0.self_attention.linear_qkv._extra_state": QKV_SCALES,
    "0.mlp.experts.linear_fc1._extra_state7": EXPERT_SCALES,
    "0.mlp.router.weight": ROUTER,
}


@pytest.mark.parametrize(
    ("saved", "keys"),
    [
        # the norm has its local name, and scales, of which one is not there, are left out
        (LOCAL, [LOCAL_NORM, ROUTER]),
        # a checkpoint with the model's own names is asked as ever
        ({*OF_TE.values()}, [*OF_TE.values()]),
        # a weight that the checkpoint lacks is still asked for
        (LOCAL - {ROUTER}, [LOCAL_NORM, ROUTER]),
        (LOCAL - {LOCAL_NORM}, [NORM, ROUTER]),
    ],
)
def test_what_is_asked_for(saved: set[str], keys: list[str]) -> None:
    state = {name: SimpleNamespace(key=key) for name, key in OF_TE.items()}
    assert [item.key for item in asked(state, saved).values()] == keys
