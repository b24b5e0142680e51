"""Hybrid models on the CPU, on an unpatched Megatron."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from megatron_r3.cpu import NotEmulated
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.tiny import LossAndGradients, config, hybrid, loss_and_gradients, model, start

HYBRID = "*E*E"
# nothing that only a patched tree knows
OPTIONS: dict[str, Any] = {"moe_router_replay": False, "qk_layernorm": False}


def step(model: Any) -> LossAndGradients:
    return loss_and_gradients(model, nullcontext())


def difference(one: LossAndGradients, other: LossAndGradients) -> float:
    """The largest difference, relative to the largest value of each tensor."""
    assert one[1].keys() == other[1].keys()
    pairs = [(one[0], other[0]), *((one[1][name], other[1][name]) for name in one[1])]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)


def name_in_hybrid(name: str) -> str:
    """A GPT layer is two layers of a hybrid model: attention, then experts."""
    if name.startswith("decoder.layers."):
        _, _, layer, rest = name.split(".", 3)
        is_attention = rest.startswith(("input_layernorm", "self_attention"))
        return f"decoder.layers.{2 * int(layer) + (not is_attention)}.{rest}"
    return name.replace("final_layernorm", "final_norm")


def hybrid_and_gpt(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """A hybrid model and the GPT with the same weights."""
    start()
    options = {**OPTIONS, **options}
    gpt = model(config(num_layers=2, **options))
    same = hybrid(HYBRID, **options)
    fresh = step(same)
    weights = {name_in_hybrid(n): p for n, p in gpt.named_parameters()}
    assert weights.keys() == dict(same.named_parameters()).keys()
    same.load_state_dict(weights, strict=False)
    want, gradients = step(gpt)
    gpt_step = want, {name_in_hybrid(n): g for n, g in gradients.items()}
    return {
        "layers": {m.layer_number for m in same.modules() if type(m).__name__ == "MoELayer"},
        "routers": {m.layer_number for m in same.modules() if type(m).__name__ == "TopKRouter"},
        "experts": len(same.decoder.layers[1].mlp.experts.local_experts),
        "norms of queries": sum("q_layernorm" in name for name in weights),
        "final norm": type(same.decoder.final_norm).__name__,
        "difference": difference(step(same), gpt_step),
        "other weights": difference(fresh, gpt_step),
    }


@pytest.mark.parametrize(("experts", "qk_layernorm"), [(8, False), (5, True)])
def test_a_hybrid_model_is_the_gpt_of_its_layers(unpatched, experts, qk_layernorm):
    options = {"num_moe_experts": experts, "qk_layernorm": qk_layernorm}
    (got,) = unpatched.run(hybrid_and_gpt, 1, options)
    assert got["layers"] == got["routers"] == {2, 4}
    assert (got["experts"], got["final norm"]) == (experts, "RMSNorm")
    assert got["norms of queries"] == 2 * qk_layernorm
    assert got["difference"] < 1e-6
    assert got["other weights"] > 1e-2


def dense_layers(rank: int) -> list[Any]:
    start()
    some = hybrid("*-E", **OPTIONS)
    loss, gradients = step(some)
    assert loss.isfinite()
    return [type(layer.mlp).__name__ for layer in some.decoder.layers] + [
        all(g.isfinite().all() and g.any() for n, g in gradients.items() if "layers.1." in n)
    ]


def test_a_dense_layer(unpatched: TreeWorker) -> None:
    assert unpatched.run(dense_layers, 1) == [["IdentityOp", "MLP", "MoELayer", True]]


def refused(rank: int, pattern: str) -> str:
    start()
    with pytest.raises(NotEmulated) as error:
        hybrid(pattern, **OPTIONS)
    return str(error.value)


@pytest.mark.parametrize("pattern", ["M*E", "G*E"])
def test_other_layers_are_refused(unpatched: TreeWorker, pattern: str) -> None:
    assert "attention (*), MLP (-) and MoE (E)" in unpatched.run(refused, 1, pattern)[0]
