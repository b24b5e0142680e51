"""Training on rollouts through the patched pretrain(): what runs is what was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from slow import slow_except
from training import Policy, changed_store, train

from demo.report import measured
from proof.fidelity.line_checks import LAYOUTS_OFF
from proof.fidelity.off import train_off
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.rollouts import CONTROLS


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


@pytest.mark.parametrize("layout", slow_except(LAYOUTS_OFF, "1 process"))
def test_option_off_is_bitwise_the_unpatched_tree(patched, unpatched, layout):
    ranks, more = LAYOUTS_OFF[layout]
    want, got = (
        worker.run(train_off, ranks, more, timeout_s=180) for worker in (unpatched, patched)
    )
    for (_, theirs), (before, mine) in zip(want, got, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert not all(torch.equal(mine[name], before[name]) for name in mine)
