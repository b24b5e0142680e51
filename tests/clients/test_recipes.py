"""Published recipes of Megatron-Bridge, scaled down, train with replay.

Shape suffixes (docs/glossary.md): B, K, L, S, T.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from client_workers import from_clone, worker_with
from recipes import DEEPSEEK, QWEN, QWEN_8, scaled
from replay_layouts import MICROBATCHES, Data, live, own_rows, run_step
from watch import watched_plans

from megatron_r3 import ModelRoutes, RouteArrays, local_routers, replaying
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.tiny import BATCH, EXPERTS, LAYERS, SEQUENCE

TP2_PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
# the recipe's layers on two stages in place of sixteen
LAYOUT = [["embedding", "decoder", "decoder"], ["decoder", "decoder", "mtp", "loss"]]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-30B-A3B for 16 H100": (QWEN, {"expert_model_parallel_size": 4}),
    "Qwen3-30B-A3B for 8 H100": (QWEN_8, {**TP2_PP2, "expert_model_parallel_size": 2}),
    "DeepSeek-V3 for 1,024 H100": (
        DEEPSEEK,
        {**TP2_PP2, "expert_model_parallel_size": 2, "pipeline_model_parallel_layout": LAYOUT},
    ),
}


@pytest.fixture(scope="module")
def bridge(
    clients: Path, patched_tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TreeWorker]:
    folder = from_clone("BRIDGE", ["src/megatron"], tmp_path_factory.mktemp("bridge")) / "src"
    with worker_with(patched_tree, [folder, clients / "site"], "import_bridge") as worker:
        yield worker


def trained(rank: int, name: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Two steps on the same micro-batches, then forward passes: live, and by shifted routes."""
    config, chunks, optimizer = scaled(name, **sizes)
    data = Data()
    moe = [layer for layer, sparse in enumerate(frequency(config.model)) if sparse]
    # a router sees tokens in the order [S, B]: token s of sample b is row s * BATCH + b
    rows_BS = torch.arange(SEQUENCE * BATCH).reshape(SEQUENCE, BATCH).T.contiguous()

    def by(routes: list[torch.Tensor]) -> Any:
        numbers = itertools.count()

        def replay(chunk: Any, own_LTK: torch.Tensor, run: Any) -> Any:
            ids_LTK = routes[next(numbers)][moe]
            source = RouteArrays(ids_LTK.numpy(), EXPERTS, moe)
            with replaying(ModelRoutes(chunk).microbatch(source, rows_BS)):
                return run()

        return replay

    own = [own_rows(ids_LTK, chunks[0]) for ids_LTK in data.routes]
    shifted = [ids_LTK.roll(1, 1) for ids_LTK in data.routes]
    losses, wrong, passes, planned = [], 0, 0, 0
    for _ in range(2):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        with watched_plans() as plans:
            step = run_step(chunks, data, by(data.routes))
        done, norm, _ = optimizer.step()
        assert done
        losses.append(step.loss)
        wrong += step.wrong_passes(own)
        passes += len(step.maps)
        planned += sum(plans)
    controls = {
        kind: run_step(chunks, data, way, forward_only=True).wrong_passes(own)
        for kind, way in {"live": live, "token": by(shifted)}.items()
    }
    return {
        "passes": passes,
        "planned": planned,
        "wrong": wrong,
        "losses": losses,
        "norm": float(norm),
        "routers": len([*itertools.chain(*map(local_routers, chunks))]),
        "controls": controls,
    }


def frequency(model: Any) -> list[int]:
    return model.moe_layer_freq if isinstance(model.moe_layer_freq, list) else [1] * LAYERS


@pytest.mark.parametrize("case", CASES)
def test_a_recipe_trains_with_replay(bridge: TreeWorker, case: str) -> None:
    name, sizes = CASES[case]
    recompute = 2 if name == QWEN_8 else 1
    for result in bridge.run(trained, 4, name, sizes, timeout_s=240):
        assert result["routers"] > 0
        assert result["passes"] == 2 * MICROBATCHES * result["routers"] * recompute
        assert result["planned"] == result["passes"]
        assert result["wrong"] == 0
        assert set(result["controls"].values()) == {MICROBATCHES * result["routers"]}
        assert result["norm"] > 0
        if result["losses"][0] is not None:
            assert not torch.equal(*result["losses"])
