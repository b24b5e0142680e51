"""Training by a dispatch plan is training without one, bit for bit; a wrong one stops it.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow import slow_except
from training import Policy, train
from watch import watched_plans

from megatron_r3.data.store import RolloutStore, write_shard
from megatron_r3.replay.plan import LayerSizes
from megatron_r3.replay.routes import Routes
from proof.fidelity.rig.rank_process import RankError
from proof.fidelity.rig.worker import TreeWorker

EP2 = ["--expert-model-parallel-size", "2"]
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
OFF = ["--no-moe-router-replay-dispatch-plan"]


def asked_for_sizes(rank: int, argv: list[str]) -> tuple[Counter[str], dict[str, torch.Tensor]]:
    """How often a layer had a plan, or none, and the weights after training."""
    with watched_plans() as plans:
        weights = train(rank, argv)
    return Counter("plan" if planned else "none" for planned in plans), weights


LAYOUTS = {
    "1 process": (1, []),
    "EP2, recomputed": (2, [*EP2, *RECOMPUTE.split()]),
    "EP2, all-gather": (2, [*EP2, "--moe-token-dispatcher-type", "allgather"]),
}


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "EP2, recomputed", "EP2, all-gather"))
def test_every_layer_and_pass_has_its_plan_and_trains_as_without(
    patched: TreeWorker, policy: Policy, layout: str
) -> None:
    ranks, more = LAYOUTS[layout]
    argv = policy.arguments(*more, "--train-iters", "2")
    microbatches, passes = 2 * 4 // ranks, 2 if "recompute" in layout else 1
    results = patched.run(asked_for_sizes, ranks, argv, timeout_s=240)
    without = patched.run(asked_for_sizes, ranks, [*argv, *OFF], timeout_s=240)
    for (counts, weights), (none, want) in zip(results, without, strict=True):
        assert counts == {"plan": 4 * microbatches * passes}
        assert not none
        assert weights.keys() == want.keys()
        assert all(torch.equal(weights[name], want[name]) for name in want)


def test_a_missing_row_on_one_rank_sends_all_ranks_the_ordinary_way(
    patched: TreeWorker, policy: Policy, tmp_path: Path
) -> None:
    source = RolloutStore([policy.store])
    rollouts = [source.rollout(index) for index in range(len(source))]
    recorded = np.arange(rollouts[0].routes.num_rows) != 3
    routes = Routes.from_array(rollouts[0].routes.ids_LTK, 16, recorded)
    rollouts[0] = replace(rollouts[0], routes=routes)  # of the first rank's first microbatch
    write_shard(tmp_path / "store", source.info, rollouts)
    argv = policy.arguments(*EP2, store=tmp_path / "store")
    for counts, _ in patched.run(asked_for_sizes, 2, argv, timeout_s=240):
        assert counts == {"none": 4, "plan": 4}


def train_by_a_wrong_plan(rank: int, argv: list[str], field: str) -> None:
    """One number of layer 2 on rank 1 is one too large."""
    from megatron_r3.replay.planner import Planner

    plan = Planner.plan

    def wrong(self: Planner, routes: Any) -> Any:
        made = plan(self, routes)
        if rank == 1 and made is not None:
            values = getattr(made[2], field)
            changed = values.clone() if isinstance(values, torch.Tensor) else values.copy()
            changed.reshape(-1)[0] += 1
            made[2] = replace(made[2], **{field: changed})
        return made

    Planner.plan = wrong  # type: ignore[method-assign]
    train(rank, argv)


# Guests are compared as the places that tokens go to, and the load at home is that of a training
# without guests: test_guests.py.
COMPARED = [f.name for f in fields(LayerSizes) if f.name not in ("guests", "load_at_home")]


@pytest.mark.parametrize("field", COMPARED)
def test_a_wrong_plan_is_named_by_the_check(
    patched: TreeWorker, policy: Policy, field: str
) -> None:
    argv = policy.arguments(*EP2, "--moe-router-replay-verify-plan")
    with pytest.raises(RankError, match=f"dispatch plan: layer 2, rank 1: {field} is"):
        patched.run(train_by_a_wrong_plan, 2, argv, field, timeout_s=120)


@pytest.mark.parametrize(
    "field", ["input_splits", "output_splits", "received", "tokens_per_expert"]
)
def test_a_wrong_plan_fails_loudly_without_the_check(
    patched: TreeWorker, policy: Policy, field: str
) -> None:
    with pytest.raises(RankError, match=r"(?i)split|size"):
        patched.run(train_by_a_wrong_plan, 2, policy.arguments(*EP2), field, timeout_s=120)


def count_one_too_many(rank: int, argv: list[str]) -> None:
    from megatron_r3.replay import planner as ahead

    count = ahead.count_tokens

    def wrong(ids_LTK: np.ndarray, num_experts: int) -> np.ndarray:
        counts = count(ids_LTK, num_experts)
        counts[2, 5] += rank
        return counts

    ahead.count_tokens = wrong
    train(rank, argv)


def test_a_wrong_count_does_not_become_a_plan(patched: TreeWorker, policy: Policy) -> None:
    with pytest.raises(RankError, match=r"rank 1 of the expert group sends .* in layer 3, and"):
        patched.run(count_one_too_many, 2, policy.arguments(*EP2), timeout_s=120)
