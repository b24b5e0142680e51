"""What is logged of the load of the ranks: counted by hand from the rollouts.

Shape suffixes (docs/glossary.md): K, L, R, T.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from slow import slow_except
from training import train

from demo.task import SEQ_LENGTH
from megatron_r3.data.store import RolloutStore
from proof.fidelity.rig.worker import TreeWorker

NAME = "expert load max/mean"
EXPERTS, TOPK, LAYERS, MICRO_BATCH, ROLLOUTS = 16, 4, 4, 4, 32
# processes, options, and of how many data-parallel ranks the experts are shared out among
LAYOUTS = {
    "EP2 DP2": (4, "--expert-model-parallel-size 2", 4, 2),
    "EP2 PP2": (4, "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2", 2, 2),
    "EP4": (4, "--expert-model-parallel-size 4", 4, 4),
}


def groups_of(dp: int, ep: int) -> Iterator[list[list[int]]]:
    """The rollouts of each rank, for each group of ranks that shares the experts, step by step.

    Megatron's sampler gives data-parallel rank d the d-th micro-batch of each `dp` micro-batches.
    """
    for first in range(0, ROLLOUTS, MICRO_BATCH * dp):
        ranks = [
            [*range(first + d * MICRO_BATCH, first + (d + 1) * MICRO_BATCH)] for d in range(dp)
        ]
        for group in range(0, dp, ep):
            yield ranks[group : group + ep]


def by_hand(store: RolloutStore, dp: int, ep: int, shift: int = 0) -> dict[str, float]:
    """The values that are logged, one id at a time.

    Args:
        shift: which rollout is taken in the place of each; a control.
    """
    busiest, mean = np.zeros(LAYERS), np.zeros(LAYERS)
    for ranks in groups_of(dp, ep):
        for layer in range(LAYERS):
            load_R = np.zeros(ep)
            for rollouts in ranks:
                tokens = 0
                for rollout in rollouts:
                    routes = store.rollout((rollout + shift) % ROLLOUTS).routes
                    tokens += routes.num_rows
                    for expert in routes.ids_LTK[layer].ravel().tolist():
                        load_R[expert * ep // EXPERTS] += 1
                padding = MICRO_BATCH * SEQ_LENGTH - tokens
                for number in range(padding * TOPK):  # padding takes the experts in turn
                    load_R[number % EXPERTS * ep // EXPERTS] += 1
            busiest[layer] += load_R.max()
            mean[layer] += load_R.mean()
    of_layers = {f"{NAME}/layer {i + 1}": busiest[i] / mean[i] for i in range(LAYERS)}
    return {NAME: busiest.sum() / mean.sum(), **of_layers}


def logged(worker: TreeWorker, ranks: int, argv: list[str], log: Path) -> dict[str, float]:
    worker.run(train, ranks, [*argv, "--rollouts-log", str(log)], timeout_s=240)
    (line,) = log.read_text().splitlines()
    return {name: value for name, value in json.loads(line).items() if name.startswith(NAME)}


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "EP2 PP2"))
def test_it_is_what_the_rollouts_say(patched, policy, tmp_path, layout):
    ranks, options, dp, ep = LAYOUTS[layout]
    argv = policy.arguments("--micro-batch-size", str(MICRO_BATCH), *options.split())
    got = logged(patched, ranks, argv, tmp_path / "log.jsonl")
    expected = by_hand(RolloutStore([policy.store]), dp, ep)
    assert got == pytest.approx(expected, rel=1e-12)
    assert got[NAME] > 1
    assert got != pytest.approx(by_hand(RolloutStore([policy.store]), dp, ep, shift=1), rel=1e-12)


def test_without_a_plan_nothing_is_logged(patched, policy, tmp_path):
    one = logged(patched, 1, policy.arguments(), tmp_path / "one.jsonl")
    assert one == {}  # one rank has all experts
    argv = policy.arguments("--expert-model-parallel-size", "2")
    argv.remove("--moe-router-replay")
    assert logged(patched, 2, argv, tmp_path / "live.jsonl") == {}
