"""Gate weights and router gradients against an independent fp64 autograd reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_r3.replay.active import MicrobatchRoutes, replaying
from megatron_r3.seams.router import RouterHook
from proof.fidelity.rig.worker import TreeWorker

T, E = 40, 16
CASES = {
    "softmax after top-k": {"topk": 4},
    "softmax before top-k": {"topk": 4, "use_pre_softmax": True},
    "softmax before, scaled": {"topk": 4, "use_pre_softmax": True, "scaling_factor": 2.5},
    "sigmoid": {"topk": 4, "score_function": "sigmoid"},
    "sigmoid, bias, groups, scaled": {
        "topk": 4,
        "score_function": "sigmoid",
        "num_groups": 4,
        "group_topk": 2,
        "scaling_factor": 2.5,
        "bias": True,
    },
    "sqrtsoftplus, bias": {"topk": 4, "score_function": "sqrtsoftplus", "bias": True},
    "K=1, softmax before": {"topk": 1, "use_pre_softmax": True},
    "K=1, sigmoid": {"topk": 1, "score_function": "sigmoid"},
    "K=1, softmax after": {"topk": 1},
}


def reference(logits: torch.Tensor, mask: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """The paper's gate, dense, in fp64: g = I f(s) / sum I f(s), as each option means it."""
    function = options.get("score_function", "softmax")
    if function == "softmax":
        if options.get("use_pre_softmax"):
            gates = logits.softmax(dim=1) * mask
        else:
            gates = (logits.exp() * mask) / (logits.exp() * mask).sum(1, keepdim=True)
    else:
        scores = logits.sigmoid() if function == "sigmoid" else (1 + logits.exp()).log().sqrt()
        gates = scores * mask
        if options["topk"] > 1:
            gates = gates / gates.sum(1, keepdim=True)
    return gates * (options.get("scaling_factor") or 1.0)


def gate(rank: int, name: str) -> dict[str, float]:
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    options = dict(CASES[name])
    topk = options["topk"]
    generator = torch.Generator().manual_seed(0)
    logits64 = torch.randn(T, E, generator=generator, dtype=torch.float64).requires_grad_()
    logits = logits64.detach().float().requires_grad_()
    upstream = torch.randn(T, E, generator=generator, dtype=torch.float64)
    # half of the tokens take what top-k would drop
    ids = logits64.detach().topk(E, dim=1).indices
    ids = torch.where(torch.arange(T)[:, None] % 2 == 0, ids[:, :topk], ids[:, -topk:])
    mask = torch.zeros(T, E, dtype=torch.bool).scatter(1, ids, True)

    want = reference(logits64, mask, options)
    (want * upstream).sum().backward()
    if options.pop("bias", False):
        options["expert_bias"] = torch.linspace(-2, 2, E)
    config = SimpleNamespace(moe_router_enable_expert_bias=False)
    with replaying(MicrobatchRoutes({1: ids.to(torch.uint8)})):
        probs, routing_map = topk_routing_with_score_function(
            logits, router_replay=RouterHook(config, layer_number=1), **options
        )
    (probs * upstream.float()).sum().backward()
    assert logits.grad is not None
    assert logits64.grad is not None
    pre_softmax = options.get("use_pre_softmax")
    return {
        "map": float((routing_map != mask).sum()),
        "probs": (probs - want).abs().max().item(),
        "gradient": (logits.grad - logits64.grad).abs().max().item(),
        # softmax over all experts has gradients everywhere; else none outside the mask
        "outside": 0.0 if pre_softmax else logits.grad[~mask].abs().max().item(),
        "smallest inside": 1.0
        if topk == 1 and not pre_softmax and "score_function" not in options
        else logits.grad[mask].abs().min().item(),
    }


@pytest.mark.parametrize("name", CASES)
def test_gate_weights_and_gradients(patched: TreeWorker, name: str) -> None:
    (worst,) = patched.run(gate, 1, name)
    assert worst["map"] == 0
    assert worst["probs"] < 1e-6
    assert worst["gradient"] < 1e-5
    assert worst["outside"] == 0
    assert worst["smallest inside"] > 0
