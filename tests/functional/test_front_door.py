"""A loop of one's own through the front door: the same loss and gradients in every layout.

Shape suffixes (docs/glossary.md): B, K, L, S, T.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training import arguments, train

from megatron_r3 import ModelRoutes, RouteArrays, begin, end, replaying, router_mismatch
from megatron_r3.replay.active import active_microbatch
from megatron_r3.replay.microbatch import MicrobatchRoutes, ReplayError
from proof.fidelity.rig.rank_process import RankError
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.tiny import (
    BATCH,
    EXPERTS,
    FULL,
    LAYERS,
    SEQUENCE,
    TOPK,
    batch,
    config,
    fill,
    model,
    start,
)

LENGTHS = (11, 16)  # tokens of the two sequences; the rest is padding
LAYOUTS = {
    "EP2": (2, {"expert_model_parallel_size": 2}),
    "TP2+SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "CP2": (2, {"context_parallel_size": 2}),
    "CP2, EP2, recompute": (
        2,
        {"context_parallel_size": 2, "expert_model_parallel_size": 2, **FULL},
    ),
}


def drawn_routes(shift: int = 0) -> np.ndarray:
    """Distinct ids `[L, T, K]` that no live router would choose, of the rows of both sequences."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(LAYERS, sum(LENGTHS), EXPERTS, generator=generator)
    return scores.topk(TOPK, dim=2).indices.roll(shift, dims=1).numpy()


def drawn(shift: int = 0) -> RouteArrays:
    return RouteArrays(drawn_routes(shift), EXPERTS, range(LAYERS))


def whole_batch() -> dict[str, torch.Tensor]:
    tokens, positions, labels = batch()
    rows = torch.full((BATCH, SEQUENCE), -1)
    rows[0, : LENGTHS[0]] = torch.arange(LENGTHS[0])
    rows[1, : LENGTHS[1]] = LENGTHS[0] + torch.arange(LENGTHS[1])
    return {
        "tokens": tokens,
        "labels": labels,
        "position_ids": positions.contiguous(),
        "rows": rows,
        "counted": rows >= 0,
    }


def replayed(
    rank: int, sizes: dict[str, Any], shift: int = 0, wrong_plan: bool = False
) -> dict[str, Any]:
    """Loss and router gradients, summed over the ranks, of one replayed pass; the plan's layers."""
    groups = {name: size for name, size in sizes.items() if name.endswith("parallel_size")}
    start(**groups)
    gpt = model(config(moe_router_replay_verify_plan=True, **sizes))
    fill(gpt)
    with torch.no_grad():  # smaller weights, so that another order of sums changes less than 1e-6
        for name, weight in gpt.named_parameters():
            scale = 0.9 if "router" in name else 0.3
            weight.fill_(1) if weight.dim() < 2 else weight.mul_(0.2 / scale)
    model_routes = ModelRoutes(gpt)
    whole = whole_batch()
    part = model_routes.layout.split(whole, whole)
    source = drawn(shift)
    mean = model_routes.layout.mean_tokens(whole["rows"])
    routes = model_routes.microbatch(
        source, part["rows"], counted_BS=part["counted"], mean_tokens=mean
    )
    if wrong_plan and routes.plan is not None:
        routes.plan[2].input_splits[0] += 1
    with replaying(routes):
        losses = gpt(part["tokens"], part["position_ids"], None, labels=part["labels"])
    loss = (losses * (part["rows"] >= 0)).sum()
    loss.backward()
    # sums over the ranks, each of which has its own tokens, or the same tokens where only experts
    # or heads are split
    gradients = {
        layer.layer_number: layer.mlp.router.weight.grad.clone() for layer in gpt.decoder.layers
    }
    return {
        "loss": loss.item(),
        "gradients": gradients,
        "planned": sorted(routes.plan or {}),
        "mismatch": router_mismatch([routes]),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_one_process(patched: TreeWorker, layout: str) -> None:
    ranks, sizes = LAYOUTS[layout]
    (want,) = patched.run(replayed, 1, {})
    results = patched.run(replayed, ranks, sizes)
    # ranks with other tokens: their sums are those of the whole; else all ranks have the whole
    parts = results if "context_parallel_size" in sizes else results[:1]
    assert sum(r["loss"] for r in parts) == pytest.approx(want["loss"], rel=2e-6)
    split = "context_parallel_size" in sizes or "sequence_parallel" in sizes
    for layer, gradient in want["gradients"].items():
        parts = [r["gradients"][layer] for r in (results if split else results[:1])]
        got = torch.stack(parts).sum(0)
        assert torch.allclose(got, gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max()))
    assert all(result["planned"] == [1, 2, 3, 4] for result in results)
    if split:
        for layer, counts in want["mismatch"].items():
            summed = np.sum([result["mismatch"][layer] for result in results], axis=0)
            assert tuple(summed.tolist()) == counts


def test_routes_shifted_by_a_token_show(patched: TreeWorker) -> None:
    """The control: the loss of other routes is another one."""
    (want,) = patched.run(replayed, 1, {})
    (other,) = patched.run(replayed, 1, {}, 1)
    assert abs(other["loss"] - want["loss"]) > 1e-3


def test_a_wrong_plan_is_found(patched: TreeWorker) -> None:
    ranks, sizes = LAYOUTS["EP2"]
    with pytest.raises(RankError, match="dispatch plan: layer 2"):
        patched.run(replayed, ranks, sizes, 0, True)


def begun_and_ended(rank: int) -> dict[str, Any]:
    """`begin` and `end` around a pass, an abandoned one, one that raises, and one forgotten."""
    start()
    gpt = model(config(**FULL))
    whole, source = whole_batch(), drawn()
    model_routes = ModelRoutes(gpt)

    def forward() -> torch.Tensor:
        losses = gpt(whole["tokens"], whole["position_ids"], None, labels=whole["labels"])
        return losses.sum()

    def routes() -> MicrobatchRoutes:
        return model_routes.microbatch(source, whole["rows"])

    def error(call: Any) -> str:
        try:
            call()
        except (ReplayError, RuntimeError) as raised:
            return str(raised)
        return ""

    with replaying(routes()):
        want = forward()
    want.backward()
    want_gradient = gpt.decoder.layers[1].mlp.router.weight.grad.clone()
    gpt.zero_grad()
    begin(gpt, routes())
    got = forward()
    end(gpt)
    got.backward()
    seen: dict[str, Any] = {
        "equal": torch.equal(want, got),
        "gradient": torch.equal(want_gradient, gpt.decoder.layers[1].mlp.router.weight.grad),
    }
    live = forward()
    seen["live after it"] = not torch.equal(live, want)
    begin(gpt, routes())
    failing = gpt.decoder.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        forward()
    failing.remove()
    seen["nothing is active"] = active_microbatch() is None
    seen["live after an error"] = torch.equal(forward(), live)
    seen["end after an error"] = error(lambda: end(gpt))
    seen["end alone"] = error(lambda: end(gpt))
    begin(gpt, routes())
    seen["begin twice"] = error(lambda: begin(gpt, routes()))
    seen["live after begin twice"] = torch.equal(forward(), live)
    gpt = model(config(moe_router_replay=False))
    for name, nothing in (("off", routes()), ("off, empty", MicrobatchRoutes({}))):
        begin(gpt, nothing)
        forward()
        seen[name] = error(lambda: end(gpt))
    return seen


def test_begin_and_end(patched: TreeWorker) -> None:
    (seen,) = patched.run(begun_and_ended, 1)
    texts = {name: value for name, value in seen.items() if isinstance(value, str)}
    assert all(value is True for name, value in seen.items() if name not in texts), seen
    assert "did not run, or raised" in texts["end after an error"]
    assert "without a begin" in texts["end alone"]
    assert "took the routes of the first call" in texts["begin twice"]
    assert all("built with moe_router_replay off" in texts[name] for name in ("off", "off, empty"))


def refused(rank: int, name: str) -> str:
    start()
    whole = whole_batch()
    off = {"moe_router_replay": False} if name == "off" else {}
    gpt = model(config(**off))
    ids_LTK = np.tile(np.arange(TOPK), (LAYERS, sum(LENGTHS), 1))
    try:
        model_routes = ModelRoutes(gpt, plan=False)
        source = {
            "experts": lambda: RouteArrays(ids_LTK, 16, range(LAYERS)),
            "layers": lambda: RouteArrays(ids_LTK[:3], EXPERTS, (0, 1, 3)),
        }.get(name, drawn)()
        rows = whole["rows"].int() if name == "dtype" else whole["rows"]
        model_routes.microbatch(source, rows + 5 * (name == "rows"))
    except (ValueError, IndexError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("off", "built with moe_router_replay off"),
        ("experts", "top-2 of 16 experts; this model has top-2 of 8"),
        ("layers", r"no routes for the layers \[3\]"),
        ("dtype", "int64 tensor"),
        ("rows", "row id 27: these routes have the rows 0 to 26"),
    ],
)
def test_what_does_not_fit_is_refused(patched: TreeWorker, name: str, message: str) -> None:
    (error,) = patched.run(refused, 1, name)
    assert re.search(message, error), error


def replaying_script(rank: int, argv: list[str], silent: bool) -> int:
    """`pretrain()` with --moe-router-replay and a forward step that brings its own routes."""
    import sys

    from megatron_r3.train import launch

    passes = 0

    def forward_step(data_iterator: Any, module: Any) -> Any:
        from demo.pretrain import forward_step as live_step

        nonlocal passes
        passes += 1
        if silent:
            return live_step(data_iterator, module)
        with replaying(None):
            return live_step(data_iterator, module)

    from demo.pretrain import datasets

    sys.argv = ["pretrain.py", *argv]
    launch.train(datasets, forward_step)
    return passes


def test_a_script_replays_in_its_own_forward_step(patched: TreeWorker) -> None:
    batch = ["--micro-batch-size", "4", "--global-batch-size", "8", "--train-iters", "2"]
    argv = arguments(batch, ["--lr", "1e-3", "--moe-router-replay"])
    assert patched.run(replaying_script, 1, argv, False, timeout_s=120) == [4]
    with pytest.raises(RankError, match="SystemExit: 1"):
        patched.run(replaying_script, 1, argv, True, timeout_s=120)


def test_the_option_off_leaves_the_script_alone(patched: TreeWorker, tmp_path: Path) -> None:
    batch = ["--micro-batch-size", "4", "--global-batch-size", "8", "--train-iters", "1"]
    patched.run(train, 1, arguments(batch, ["--lr", "1e-3"]), timeout_s=120)
