"""Guest experts: the same training, whichever rank computes a token's expert.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from skewed_routes import furthest, skewed
from slow import slow_except
from training import STEP, Policy, gradients, same, train

from demo.model import arguments
from megatron_r3.data.store import Rollout, RolloutStore, write_shard
from megatron_r3.replay.routes import Routes
from proof.fidelity.rig.worker import TreeWorker

LAYERS, EXPERTS = 4, 16
GUESTS = "--moe-router-replay-guest-slots 2 --moe-router-replay-guest-tokens 1"
NO_GUEST = "--moe-router-replay-guest-slots 2 --moe-router-replay-guest-tokens 1000000"
LOAD, AT_HOME = "expert load max/mean", "expert load max/mean without guests"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
BUCKETS = "--ddp-bucket-size 3000"


# what `make fidelity` has more of, and what it has not: grouped experts
CASES = {
    "grouped experts, full recompute": f"--moe-grouped-gemm {RECOMPUTE}",
    "grouped experts, activations recomputed": (
        "--moe-grouped-gemm --recompute-granularity selective --recompute-modules moe_act"
    ),
}


@pytest.fixture(scope="session")
def store(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy's rollouts, with most of the load on the first of two ranks.

    Each has the advantage 1: those of a group cancel each other, and so would most of a gradient,
    whose rounding errors do not.
    """
    folder, policys = tmp_path_factory.mktemp("skewed") / "store", RolloutStore([policy.store])
    rollouts = [skewed_rollout(policys.rollout(index)) for index in range(len(policys))]
    write_shard(folder, policys.info, rollouts)
    return folder


def skewed_rollout(rollout: Rollout) -> Rollout:
    ids_LTK = skewed(rollout.routes.ids_LTK.shape, 0.8, 2, EXPERTS)
    return replace(rollout, routes=Routes.from_array(ids_LTK, EXPERTS), advantage=1.0)


@pytest.mark.parametrize("name", slow_except(CASES, "grouped experts, full recompute"))
def test_gradients_are_those_without_guests(patched, store, tmp_path, name):
    argv = on(store, "--clip-grad", "0", "--moe-router-replay-verify-plan", *CASES[name].split())
    found, logs = {}, {}
    for way, options in {"plain": "", "empty": NO_GUEST, "guests": GUESTS}.items():
        more = [*options.split(), "--rollouts-log", str(tmp_path / way)]
        found[way] = patched.run(gradients, 2, [*argv, *more], timeout_s=300)
        logs[way] = json.loads((tmp_path / way).read_text().splitlines()[-1])
        assert logs[way]["routes dispatched as recorded"] == 1.0
    assert same(found["plain"], found["empty"])
    assert furthest(found["guests"], found["plain"]) < 2e-6
    assert not same(found["guests"], found["plain"])  # guests computed something
    assert AT_HOME not in logs["plain"]
    assert logs["guests"][AT_HOME] == logs["empty"][LOAD] == logs["plain"][LOAD] > 1.2
    assert logs["guests"][LOAD] < 1.02


def on(store: Path, *more: str) -> list[str]:
    """Arguments of a replayed training on a store, on two ranks that share the experts."""
    rollouts = ["--rollouts", str(store), "--rollouts-policy", "any", "--moe-router-replay"]
    rollouts += ["--rollouts-advantages", "stored"]
    return arguments(STEP, rollouts, ["--expert-model-parallel-size", "2"], list(more))


def asked_for_parameters(rank: int, argv: list[str]) -> list[bool]:
    """Whether those of the next layer were there, each time that its guests could travel ahead."""
    from megatron_r3.seams import guests

    are_there, answers = guests.parameters_are_there, []

    def noted(experts: Any) -> bool:
        answers.append(are_there(experts))
        return answers[-1]

    guests.parameters_are_there = noted
    train(rank, argv)
    return answers


def test_weights_travel_ahead_once_parameters_are_there(patched: TreeWorker, store: Path) -> None:
    """Two steps of two micro-batches; that a layer has a next one is known after the first."""
    argv = on(store, *f"--train-iters 2 --micro-batch-size 4 {GUESTS}".split())
    assert all(all(answers) for answers in patched.run(asked_for_parameters, 4, argv))
    expected = [(LAYERS - 1) * [there] for there in (True, False, True)]
    for answers in patched.run(asked_for_parameters, 4, [*argv, *f"{OVERLAP} {BUCKETS}".split()]):
        assert answers == [answer for microbatch in expected for answer in microbatch]
