"""Models that mbridge and megatron-bridge build replay, by the option and by RouterReplay's calls.

Shape suffixes (docs/glossary.md): B, K, L, S, T.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bridge_models import DECIDES, build
from client_workers import from_clone, worker_with
from replay_layouts import (
    LAYOUTS,
    MICROBATCHES,
    Data,
    Step,
    live,
    own_rows,
    replay_as_upstream_says,
    replay_natively,
    run_step,
    same,
)
from watch import maps_of, watched_plans

from megatron_r3 import ModelRoutes, RouteArrays, local_routers, replaying
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.tiny import BATCH, EXPERTS, LAYERS, SEQUENCE, make_chunks, start


@pytest.fixture(
    scope="module", params=["mbridge 0.15.1", "megatron-bridge 0.3.1", "megatron-bridge 0.6.0"]
)
def library(
    request: pytest.FixtureRequest,
    clients: Path,
    patched_tree: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, TreeWorker]]:
    """The library's name, and a worker that has imported it."""
    name, version = request.param.split()
    if version == "0.6.0":  # not on PyPI
        folder = from_clone("BRIDGE", ["src/megatron"], tmp_path_factory.mktemp("bridge")) / "src"
    else:
        folder = clients / f"{name}-{version}"
    # "mbridge", or the module that imports megatron.bridge
    module = "mbridge" if name == "mbridge" else "import_bridge"
    with worker_with(patched_tree, [folder, clients / "site"], module) as worker:
        yield name, worker


def in_a_layout(rank: int, name: str, layout: str, recompute: str) -> dict[str, Any]:
    """The plain model without recompute, and the library's by the two ways."""
    data = Data()
    plain = make_chunks(LAYOUTS[layout][1], moe_router_replay=True, **DECIDES[name])
    want = run_step(plain, data, replay_natively)
    by_option = build(name, layout, recompute, moe_router_replay=True)
    results = {"option": measured(by_option, data, replay_natively, want)}

    import megatron_r3.frameworks.router_replay  # noqa: F401

    dropped_in = build(name, layout, recompute, moe_enable_routing_replay=True)
    results["drop-in"] = measured(dropped_in, data, replay_as_upstream_says, want)
    return results


def measured(chunks: list[Any], data: Data, way: Any, want: Step) -> dict[str, Any]:
    """A step after a forward-only pass, and controls.

    A control says whether all of its passes took other routes, and whether it ended as the step.
    """
    own = [own_rows(ids_LTK, chunks[0]) for ids_LTK in data.routes]
    with torch.no_grad():
        run_step(chunks, Data(1), way, forward_only=True)
    step = run_step(chunks, data, way)
    controls = {"live": run_step(chunks, data, live)} if way is replay_natively else {}
    for name, shifted in {
        "token": [ids_LTK.roll(1, 1) for ids_LTK in data.routes],
        "expert": [(ids_LTK + 1) % 8 for ids_LTK in data.routes],
    }.items():
        controls[name] = run_step(chunks, data, way, shifted)
    return {
        "passes": len(step.maps),
        "wrong": step.wrong_passes(own),
        "routers": sorted(step.routers),
        "as the plain model": same(step, want),
        "controls": {
            name: (control.wrong_passes(own) == len(control.maps), same(step, control))
            for name, control in controls.items()
        },
    }


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_of_the_library_replays(library, layout, recompute):
    name, worker = library
    ranks = worker.run(in_a_layout, LAYOUTS[layout][0], name, layout, recompute, timeout_s=180)
    layers = list(range(1, LAYERS + 1))
    for rank, results in enumerate(ranks):
        own_layers = layers
        if layout == "PP2":
            own_layers = layers[rank * 2 : rank * 2 + 2]
        elif layout == "PP2 VPP2":
            own_layers = layers[rank::2]
        passes = len(own_layers) * MICROBATCHES * (1 if recompute == "none" else 2)
        for way, result in results.items():
            controls = result.pop("controls")
            assert result == {
                "passes": passes,
                "wrong": 0,
                "routers": own_layers,
                "as the plain model": True,
            }, way
            assert set(controls.values()) == {(True, False)}, (way, controls)


def as_it_is_trained(rank: int, name: str, recompute: str) -> dict[str, Any]:
    """A wrapped model, on routes that `ModelRoutes` reads from an array, with a dispatch plan."""
    start(expert_model_parallel_size=2)
    options = {"moe_router_replay": True, "moe_router_replay_verify_plan": True}
    (model,) = build(name, "EP2", recompute, wrapped=True, **options)
    gpt = model.module.module
    data = Data(rank)  # each rank has its own tokens
    tokens_BS, ids_LTK = data.tokens[0], data.routes[0]
    positions_BS = torch.arange(SEQUENCE).expand(BATCH, -1)
    # a router sees tokens in the order [S, B]: token s of sample b is row s * BATCH + b
    rows_BS = torch.arange(SEQUENCE * BATCH).reshape(SEQUENCE, BATCH).T.contiguous()
    model_routes = ModelRoutes(model)
    source = RouteArrays(ids_LTK.numpy(), EXPERTS, range(LAYERS))
    results = {}
    for which, given_BS in {"step": rows_BS, "shifted": rows_BS.roll(1, 1)}.items():
        model.zero_grad_buffer()
        step = Step(maps=maps_of(gpt))
        with watched_plans() as plans:
            with replaying(model_routes.microbatch(source, given_BS)):
                output = model(tokens_BS[:, :-1], positions_BS, None, labels=tokens_BS[:, 1:])
            output.sum().backward()
        results[which] = {
            "passes": len(step.maps),
            "wrong": step.wrong_passes([ids_LTK]),
            "planned": sum(plans),
            "loss": output.sum().detach(),
            "gradients": [
                router.weight.main_grad.clone() for router in local_routers(gpt).values()
            ],
        }
    return {"wrapped by": (type(model).__name__, type(model.module).__name__), **results}


def test_a_wrapped_model_replays_an_array(library: tuple[str, TreeWorker]) -> None:
    name, worker = library
    ranks = {
        recompute: worker.run(as_it_is_trained, 2, name, recompute)
        for recompute in ("none", "full")
    }
    for recompute, results in ranks.items():
        passes = LAYERS * (1 if recompute == "none" else 2)
        for result in results:
            assert result["wrapped by"] == ("DistributedDataParallel", "Float16Module")
            step, shifted = result["step"], result["shifted"]
            assert (step["passes"], step["wrong"], step["planned"]) == (passes, 0, passes)
            assert (shifted["passes"], shifted["wrong"]) == (passes, passes)
            assert not torch.equal(step["loss"], shifted["loss"])
    for without, full in zip(ranks["none"], ranks["full"], strict=True):
        assert torch.equal(without["step"]["loss"], full["step"]["loss"])
        for one, other in zip(without["step"]["gradients"], full["step"]["gradients"], strict=True):
            assert one.any()
            assert torch.equal(one, other)
