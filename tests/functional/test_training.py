"""Training on rollouts through the patched pretrain(): what runs is what was recorded.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow import slow, slow_except
from training import Policy, changed_store, train

from demo.model import arguments
from demo.report import measured
from megatron_r3.data.store import RolloutStore, write_shard
from megatron_r3.replay.routes import Routes
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.rollouts import CONTROLS

EP2 = ["--expert-model-parallel-size", "2"]
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
RECOMPUTE += ["--recompute-num-layers", "1"]


def step(worker: TreeWorker, ranks: int, argv: list[str], folder: Path) -> dict[str, Any]:
    """One training, and what it wrote through Megatron's TensorBoard writer."""
    worker.run(train, ranks, [*argv, "--tensorboard-dir", str(folder)], timeout_s=240)
    return measured(folder)


@pytest.fixture(scope="session")
def whole(patched: TreeWorker, policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The step of one process."""
    return step(patched, 1, policy.arguments(), tmp_path_factory.mktemp("whole"))


def test_live_training_dispatches_otherwise_and_is_measured_the_same_way(
    patched: TreeWorker, policy: Policy, whole: dict[str, Any], tmp_path: Path
) -> None:
    argv = [a for a in policy.arguments() if a != "--moe-router-replay"]
    live = step(patched, 1, argv, tmp_path)
    assert live["routes_dispatched_as_recorded"] < 1.0
    assert live["router_mismatch"] > 0
    assert live["mean_abs_dlogp"] > whole["mean_abs_dlogp"]


@pytest.mark.parametrize("control", slow_except(CONTROLS, "swap_layers"))
def test_a_wrong_store_is_replayed_as_it_says_and_its_agreement_shows_it(
    patched: TreeWorker, policy: Policy, whole: dict[str, Any], tmp_path: Path, control: str
) -> None:
    store = changed_store(policy.store, tmp_path / "wrong", CONTROLS[control])
    got = step(patched, 1, policy.arguments(store=store), tmp_path / "events")
    assert got["routes_dispatched_as_recorded"] == 1.0
    assert got["mean_abs_dlogp"] > 3 * whole["mean_abs_dlogp"]
    assert got["k3_kl"] > 3 * whole["k3_kl"]
    assert got["router_mismatch"] > 3 * whole["router_mismatch"]


def test_validation_between_steps_is_the_scripts_own_and_live(patched, policy, tmp_path):
    more = ["--train-iters", "2", "--eval-interval", "1"]
    plain = patched.run(train, 1, policy.arguments(*more), timeout_s=120)
    evaluated = patched.run(
        train, 1, policy.arguments(*more, "--eval-iters", "1"), validate=True, timeout_s=120
    )
    assert plain[0].keys() == evaluated[0].keys()
    assert all(torch.equal(plain[0][name], evaluated[0][name]) for name in plain[0])


SCRIPTS_OWN = ["--micro-batch-size", "4", "--global-batch-size", "8", "--train-iters", "5"]
SCRIPTS_OWN += ["--lr", "1e-3", "--moe-aux-loss-coeff", "1e-2", "--seed", "7"]
SCRIPTS_OWN += ["--recompute-granularity", "selective", "--recompute-modules", "moe"]


@pytest.mark.parametrize("layout", [[], slow(EP2)])
def test_option_off_is_bitwise_the_unpatched_tree(patched, unpatched, layout):
    argv, ranks = arguments(SCRIPTS_OWN, layout), 2 if layout else 1
    want = unpatched.run(train, ranks, argv, hidden=True, timeout_s=120)
    got = patched.run(train, ranks, argv, hidden=True, timeout_s=120)
    other = patched.run(train, ranks, [*argv, "--seed", "8"], hidden=True, timeout_s=120)
    for mine, theirs, control in zip(got, want, other, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert not all(torch.equal(mine[name], control[name]) for name in mine)


def test_missing_rows_are_routed_live_and_the_same_in_recompute(patched, policy, tmp_path):
    source = RolloutStore([policy.store])
    rollouts = [source.rollout(index) for index in range(len(source))]
    rng = np.random.default_rng(0)
    holes = [rng.random(rollout.routes.num_rows) < 0.3 for rollout in rollouts]
    with_holes = [
        replace(r, routes=Routes.from_array(r.routes.ids_LTK, 16, ~hole))
        for r, hole in zip(rollouts, holes, strict=True)
    ]
    write_shard(tmp_path / "store", source.info, with_holes)
    argv = policy.arguments(store=tmp_path / "store")
    plain = step(patched, 1, argv, tmp_path / "plain")
    again = step(patched, 1, [*argv, *RECOMPUTE], tmp_path / "recompute")
    for got in (plain, again):
        assert got["routes_dispatched_as_recorded"] == 1.0
    assert again["loss"] == pytest.approx(plain["loss"], abs=1e-6)
    assert again["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
