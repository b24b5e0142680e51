"""Replay under moe_router_fusion: the one-kernel gate in real routers, and without a GPU none.

The kernel itself is tested in tests/unit/replay/gate/test_interpreted.py. Here its torch reference
runs where the kernel would, so that the seam around it is the one that a GPU has.

Shape suffixes (docs/glossary.md): K, T.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from training import train

from demo.report import measured
from megatron_r3.replay.active import MicrobatchRoutes, recording, replaying
from megatron_r3.replay.gate import (
    GateInputs,
    GateOptions,
    GateOutput,
    replayed_gate_reference,
    substitute_gate,
)
from megatron_r3.replay.tally import Tally
from proof.fidelity import tiny
from proof.fidelity.rig.worker import TreeWorker

OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "before top-k, scaled": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid, bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    "sqrtsoftplus, bias": {
        "moe_router_score_function": "sqrtsoftplus",
        "moe_router_enable_expert_bias": True,
    },
    "live bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_replay_expert_bias": "live",
    },
    "auxiliary losses": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [1e-2, 1e-2],
        "moe_z_loss_coeff": 1e-3,
    },
    "groups, full recompute": {
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        **tiny.FULL,
    },
    "live bias, full recompute": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_replay_expert_bias": "live",
        **tiny.FULL,
    },
    "float64 router": {"moe_router_dtype": "fp64"},
    "full recompute": tiny.FULL,
}


@contextmanager
def kernels_everywhere(shift: int = 0) -> Iterator[list[int]]:
    """Run the reference on the CPU where a GPU runs the kernel; yield one entry for each call.

    With `shift` a token gets the routes of the token so many places before it.
    """
    calls: list[int] = []

    def gate(inputs: GateInputs, options: GateOptions) -> GateOutput:
        calls.append(len(inputs.ids_TK))
        shifted = inputs._replace(ids_TK=inputs.ids_TK.roll(shift, 0))
        return replayed_gate_reference(shifted, options)

    with substitute_gate(gate):
        yield calls


def routes_of(gpt: Any) -> dict[int, torch.Tensor]:
    """What this model chooses, with every other token taking what another one chose."""
    with recording() as recorded, torch.no_grad():
        tokens, positions, labels = tiny.batch()
        gpt(tokens, positions, None, labels=labels)
    odd = torch.arange(tiny.SEQUENCE * tiny.BATCH)[:, None] % 2 == 1
    return {n: torch.where(odd, ids.roll(1, 0), ids) for n, ids in recorded.ids.items()}


def pass_through(options: dict[str, Any], fused: bool, routes: Any, shift: int = 0) -> Any:
    gpt = tiny.model(tiny.config(**options, moe_router_fusion=fused))
    routes = routes_of(gpt) if routes is None else routes
    tokens = torch.arange(tiny.SEQUENCE * tiny.BATCH)
    microbatch = MicrobatchRoutes(
        {n: ids.clone() for n, ids in routes.items()},
        live_T=tokens % 5 == 0,
        # a live token has nothing to compare
        tally=Tally((tokens % 3 != 0) & (tokens % 5 != 0)),
    )
    if not fused:
        return *tiny.loss_and_gradients(gpt, replaying(microbatch)), microbatch, routes, []
    with kernels_everywhere(shift) as calls:
        return *tiny.loss_and_gradients(gpt, replaying(microbatch)), microbatch, routes, calls


def furthest(these: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """The largest difference of a gradient, as a share of its largest entry."""
    return max(
        ((others[n] - g).abs().max() / g.abs().max().clamp(min=1e-6)).item()
        for n, g in these.items()
    )


def compare(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    tiny.start()
    loss, gradients, unfused, routes, _ = pass_through(options, False, None)
    loss2, gradients2, fused, _, calls = pass_through(options, True, routes)
    _, wrong, _, _, _ = pass_through(options, True, routes, shift=2)
    return {
        "loss": abs(loss2 - loss).item() / abs(loss).item(),
        "gradients": furthest(gradients, gradients2),
        "names": sorted(gradients) == sorted(gradients2),
        "ids": all(
            torch.equal(fused.ids[n].sort(1).values, unfused.ids[n].sort(1).values.to(fused.ids[n]))
            for n in routes
        ),
        "mismatched": {
            n: (int(c), int(fused.tally.mismatched[n])) for n, c in unfused.tally.mismatched.items()
        },
        "calls": len(calls),
        "wrong": furthest(gradients, wrong),
    }


@pytest.mark.parametrize("name", OPTIONS)
def test_the_fused_gate_is_the_unfused_one(patched: TreeWorker, name: str) -> None:
    (got,) = patched.run(compare, 1, OPTIONS[name])
    assert got["names"]
    assert got["ids"]
    assert got["loss"] < 1e-6
    assert got["gradients"] < 1e-4
    pairs = got["mismatched"].values()
    assert all(one == other for one, other in pairs)
    assert any(one for one, _ in pairs)
    # four layers; groups that have to choose are unfused, so is what wants the live load: in the
    # recompute as in the forward pass
    unfused = ("groups", "live bias", "float64")
    calls = 0 if any(word in name for word in unfused) else 8 if name == "full recompute" else 4
    assert got["calls"] == calls
    if got["calls"]:
        assert got["wrong"] > 1e-2  # other tokens' routes have other gradients


def asked_of_upstream(rank: int) -> list[bool]:
    """Whether each layer, live and then replayed, asks upstream for the fused top-k of a config."""
    from megatron.core.transformer.moe import router as upstream

    tiny.start()
    gpt = tiny.model(tiny.config())
    replayed = replaying(MicrobatchRoutes(routes_of(gpt)))
    gpt.config.moe_router_fusion = True  # as on a machine that has Transformer Engine
    unfused = upstream.topk_routing_with_score_function
    asked: list[bool] = []

    def seen(*args: Any, fused: bool, **options: Any) -> Any:
        asked.append(fused)
        return unfused(*args, fused=False, **options)

    upstream.topk_routing_with_score_function = seen
    for way in (nullcontext(), replayed):
        tiny.loss_and_gradients(gpt, way)
    return asked


def test_a_replayed_layer_does_not_ask_transformer_engine(patched: TreeWorker) -> None:
    (asked,) = patched.run(asked_of_upstream, 1)
    assert asked == [True] * 4 + [False] * 4


def test_a_training_without_a_gpu_falls_back(patched, policy, tmp_path):
    for name, more in {"unfused": [], "fused": ["--moe-router-fusion"]}.items():
        events = ["--tensorboard-dir", str(tmp_path / name)]
        patched.run(train, 1, [*policy.arguments(*more), *events], timeout_s=240)
    assert measured(tmp_path / "fused") == measured(tmp_path / "unfused")
