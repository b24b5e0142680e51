"""Training by a dispatch plan is training without one, bit for bit; a wrong one stops it.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
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
    "EP2, recomputed": (2, [*EP2, *RECOMPUTE.split()]),
    "EP2, all-gather": (2, [*EP2, "--moe-token-dispatcher-type", "allgather"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layer_and_pass_has_its_plan_and_trains_as_without(patched, policy, layout):
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


def train_with_padding(
    rank: int, argv: list[str], multiple: int, forget: bool = False
) -> tuple[Counter[str], dict[str, torch.Tensor]]:
    """`asked_for_sizes` with each expert's tokens padded to a multiple, as for fp8, in float32.

    Megatron pads for fp8 and fp4 alone, which CPU tensors do not have, so the option is set behind
    its check.

    Args:
        forget: the plan does not know of it.
    """
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_r3.replay import planner
    from megatron_r3.train.metrics import StepMetrics

    checked, counts = TransformerConfig.__post_init__, Counter[str]()
    pad, add = token_dispatcher.pad_routing_map, StepMetrics.add_dispatched

    def padded(config: Any) -> None:
        checked(config)
        config.moe_router_padding_for_quantization = True

    def counted(routing_map: torch.Tensor, multiple: int) -> torch.Tensor:
        before = int(routing_map.sum())
        routing_map = pad(routing_map, multiple)
        counts["added"] += int(routing_map.sum()) - before
        return routing_map

    def dispatched(metrics: StepMetrics, matched: int, total: int) -> None:
        counts["matched"] += matched
        counts["total"] += total
        add(metrics, matched, total)

    TransformerConfig.__post_init__ = padded
    token_dispatcher.get_align_size_for_quantization = lambda config: multiple
    token_dispatcher.pad_routing_map = counted
    StepMetrics.add_dispatched = dispatched  # type: ignore[method-assign]
    if forget:
        planner.pad_multiple = lambda config: 1
    plans, weights = asked_for_sizes(rank, argv)
    return counts + plans, weights


TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PADDED = {
    "EP2, recomputed": (2, [*EP2, *RECOMPUTE.split()]),
    "EP2 x ETP2": (4, [*EP2, *TP2]),
    # it pads what each expert has received
    "EP2, flex": (2, [*EP2, *"--moe-token-dispatcher-type flex --moe-enable-deepep".split()]),
}


@pytest.mark.parametrize("layout", slow_except(PADDED, "EP2, recomputed"))
def test_padding_for_quantization_changes_sizes_alone(patched, policy, layout):
    ranks, more = PADDED[layout]
    # with SGD and a rate of 1 a weight changes by its gradient
    more = [*more, "--optimizer", "sgd", "--lr", "1", "--moe-router-replay-verify-plan"]
    argv = policy.arguments(*more)
    results = patched.run(train_with_padding, ranks, argv, 8, timeout_s=240)
    without = patched.run(asked_for_sizes, ranks, argv, timeout_s=240)
    for (counts, weights), (none, want) in zip(results, without, strict=True):
        assert counts["plan"] == none["plan"]
        assert (counts["plan"] > 0) == ("flex" not in layout)  # which plans nothing
        assert counts["added"] > 0
        assert counts["matched"] == counts["total"] > 0
        for name in want:
            torch.testing.assert_close(weights[name], want[name], rtol=1e-5, atol=1e-6)


def test_a_plan_without_the_padding_is_noticed(patched: TreeWorker, policy: Policy) -> None:
    argv = policy.arguments(*EP2)
    for counts, _ in patched.run(train_with_padding, 2, argv, 8, True, timeout_s=120):
        assert counts["matched"] < counts["total"]
    checked = [*argv, "--moe-router-replay-verify-plan"]
    with pytest.raises(RankError, match=r"dispatch plan: layer 1, rank .: tokens_per_expert is"):
        patched.run(train_with_padding, 2, checked, 8, True, timeout_s=120)


def test_a_missing_row_on_one_rank_sends_all_ranks_the_ordinary_way(patched, policy, tmp_path):
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


@pytest.mark.parametrize("field", slow_except(COMPARED, "tokens_per_expert"))
def test_a_wrong_plan_is_named_by_the_check(patched, policy, field):
    argv = policy.arguments(*EP2, "--moe-router-replay-verify-plan")
    with pytest.raises(RankError, match=f"dispatch plan: layer 2, rank 1: {field} is"):
        patched.run(train_by_a_wrong_plan, 2, argv, field, timeout_s=120)


def test_a_wrong_plan_fails_loudly_without_the_check(patched: TreeWorker, policy: Policy) -> None:
    with pytest.raises(RankError, match=r"(?i)split|size"):
        patched.run(train_by_a_wrong_plan, 2, policy.arguments(*EP2), "input_splits", timeout_s=120)
