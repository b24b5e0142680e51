"""verl on megatron_r3: what verl's own replay gets wrong, what it costs, and who is refused.

Shape suffixes (docs/glossary.md): T, E.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replay_layouts import RECOMPUTE
from verl_engine import LAYOUTS, Engine
from watch import watched_plans

from megatron_r3 import ReplayError, local_routers
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.tiny import LAYERS, config, model


def refusal(what: Any) -> str:
    try:
        what()
    except ReplayError as error:
        return str(error)
    return "not refused"


# -- beside verl's own replay


def one_step(rank: int, layout: str) -> dict[str, Any]:
    engine = Engine(layout, "full", "R3")
    passes = engine.run(engine.batch(engine.given(engine.routes)))
    return {"wrong": engine.wrong(passes, engine.routes), "passes": passes}


@pytest.mark.parametrize("layout", ["1", "EP2", "CP2"])
def test_a_step_is_that_of_verls_own_replay(verl, verl_alone, layout):
    number = LAYOUTS[layout][0]
    ours, theirs = (worker.run(one_step, number, layout) for worker in (verl, verl_alone))
    for our, their in zip(ours, theirs, strict=True):
        assert our["wrong"] == their["wrong"] == 0
        for one, other in zip(our["passes"].loss, their["passes"].loss, strict=True):
            assert one == pytest.approx(other, rel=1e-5)
        for layer, gradient in their["passes"].routers.items():
            torch.testing.assert_close(our["passes"].routers[layer], gradient, rtol=1e-4, atol=1e-5)


def second_engine(rank: int) -> dict[str, Any]:
    """Another engine with replay, made after the first one; each of them trains."""
    engine = Engine("1", "full", "R3")
    engine.impl.apply_router_replay_patch()  # the second engine's __init__
    other_config = config(moe_router_replay=False, variable_seq_lengths=True, **RECOMPUTE["full"])
    engine._as_the_engine_does(other_config)
    other = model(other_config)
    data = engine.batch(engine.given(engine.routes))
    results: dict[str, Any] = {}
    for name, chunk in {"first": engine.chunks[0], "second": other}.items():
        engine.chunks = engine.engine.module = [chunk]
        engine.engine.tf_config = chunk.config
        passes = engine.run(data)
        results[name] = (len(passes.maps), engine.wrong(passes, engine.routes))
        live = engine.run(engine.batch(None, replays=False))  # as a reference model runs
        results[f"{name}, live"] = engine.wrong(live, engine.routes) == len(live.maps)
    return results


def test_a_second_engine_in_the_process_takes_nothing_away(verl, verl_alone):
    (ours,), (theirs,) = (worker.run(second_engine, 1) for worker in (verl, verl_alone))
    assert ours == {"first": (16, 0), "first, live": True, "second": (16, 0), "second, live": True}
    assert theirs["first"] == (16, 16)  # the control: verl's own forgets the first engine


def repeated_row(rank: int) -> dict[str, Any]:
    engine = Engine("1", "full", "R3")
    given = [route.clone() for route in engine.routes]
    given[0][2, 0] = given[0][2, 0, 0]  # sample 0, token 2, layer 1: one expert twice
    passes = engine.run(engine.batch(engine.given(given)))
    first = [map_TE for layer, map_TE in passes.maps if layer == 1 and bool(map_TE[2].any())]
    counts = {int(map_TE[2].sum()) for map_TE in first}
    wanted = [route.clone() for route in engine.routes]
    wanted[0][2, 0] = -1  # any experts are right there
    return {
        "experts of that token": counts,
        "wrong": engine.wrong(passes, wanted),
        # the recompute of a micro-batch follows its forward pass
        "recompute": all(torch.equal(a, b) for a, b in zip(first[::2], first[1::2], strict=True)),
        "fewest experts of a token": min(int(map_TE.sum(1).min()) for _, map_TE in passes.maps),
    }


def test_a_row_with_a_repeated_expert_is_live_once(verl, verl_alone):
    (ours,), (theirs,) = (worker.run(repeated_row, 1) for worker in (verl, verl_alone))
    assert ours == {
        "experts of that token": {2},
        "wrong": 0,
        "recompute": True,
        "fewest experts of a token": 2,
    }
    assert theirs["fewest experts of a token"] == 1  # the control: one expert, without a word


# -- plan and metrics


def planned(rank: int, layout: str, recompute: str) -> dict[str, Any]:
    engine = Engine(layout, recompute, "R3", moe_router_replay_verify_plan=True)
    with watched_plans() as plans:
        passes = engine.run(engine.batch(engine.given(engine.routes)))
    return {
        "planned": sum(plans),
        "passes": len(passes.maps),
        "wrong": engine.wrong(passes, engine.routes),
        "old": engine.is_old,
    }


@pytest.mark.parametrize(("layout", "ranks"), [("EP2", 2), ("CP2 EP2", 4)])
def test_the_dispatch_plan_is_taken_and_right(verl: TreeWorker, layout: str, ranks: int) -> None:
    for result in verl.run(planned, ranks, layout, "full", timeout_s=180):
        assert result["wrong"] == 0
        # 0.8 has no mask: its padding rows have no route, and are live
        assert result["planned"] == (0 if result["old"] else result["passes"])


def mismatch(rank: int) -> dict[str, Any]:
    engine = Engine("1", "none", "R3")
    logits: list[torch.Tensor] = []
    for router in local_routers(engine.chunks[0]).values():
        routing = router.routing

        def keep(values: torch.Tensor, *args: Any, f: Any = routing, **options: Any) -> Any:
            logits.append(values.detach().reshape(-1, 8))
            return f(values, *args, **options)

        router.routing = keep
    data = engine.batch(engine.given(engine.routes))
    logged = engine.run(data, forward_only=True).metrics
    logits.clear()
    passes = engine.run(data)
    rows = [engine._rows([0, 1]), engine._rows([2, 3])]
    ends = torch.tensor(engine.lengths).cumsum(0) - 1  # the last tokens, which have no route
    differing = compared = 0
    for number, ((_, map_TE), scores_TE) in enumerate(zip(passes.maps, logits, strict=True)):
        rows_T = rows[number // LAYERS]
        counted_T = (rows_T >= 0) & ~torch.isin(rows_T, ends)
        live_TE = torch.zeros_like(map_TE).scatter(1, scores_TE.topk(2).indices, True)
        differing += int(((live_TE != map_TE).any(1) & counted_T).sum())
        compared += int(counted_T.sum())
    return {"update": passes.metrics, "log-prob pass": logged, "want": differing / compared}


def test_the_mismatch_in_verls_metrics_is_that_of_a_live_topk(verl: TreeWorker) -> None:
    (result,) = verl.run(mismatch, 1)
    assert result["update"]["router_replay/mismatch"] == result["want"]
    assert 0 < result["want"] <= 1
    assert "router_replay/mismatch" not in result["log-prob pass"]


# -- who is refused


def other_versions(rank: int) -> dict[str, str]:
    import verl
    from verl.utils.megatron import router_replay_patch as patch
    from verl.utils.megatron import router_replay_utils as utils

    told, version = {}, verl.__version__
    for other in ("0.7.1", "0.10.0"):
        verl.__version__ = other
        told[other] = refusal(patch.apply_router_replay_patch)
    verl.__version__ = version
    theirs = utils.set_router_replay_data
    utils.set_router_replay_data = lambda layers_topk_idx, mask: None
    told["changed"] = refusal(patch.apply_router_replay_patch)
    utils.set_router_replay_data = theirs
    told["itself"] = refusal(patch.apply_router_replay_patch)
    return told


def test_a_verl_that_nobody_has_read_is_refused_by_name(verl: TreeWorker) -> None:
    (told,) = verl.run(other_versions, 1)
    assert "knows verl 0.8.0, 0.9.0, 0.9.1, not 0.7.1" in told["0.7.1"]
    assert "not 0.10.0" in told["0.10.0"]
    assert "unset VERL_USE_EXTERNAL_MODULES" in told["0.10.0"]
    assert "takes (layers_topk_idx mask), and in the release it takes" in told["changed"]
    assert told["itself"] == "not refused"
