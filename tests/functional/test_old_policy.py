"""Several updates on a collection, from the trainer's own policy at its start.

That their gradients are right, and those by the routes of the old policy (R2), is for the cases
"2 mini-steps" and "R2" of the fidelity table.

Shape suffixes (docs/glossary.md): B, S, T.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from slow import slow, slow_except
from training import Policy, fails, resumed, same, steps_on, stores, train

from megatron_r3.train.schedule import SOURCES
from proof.fidelity.rig.worker import TreeWorker

TRAINER = ["--rollouts-old-policy", "trainer"]
TWO = [*TRAINER, "--rollouts-mini-steps", "2"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "TP2 SP": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "PP2 VPP2": (
        2,
        ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"],
    ),
    "CP2": (2, ["--context-parallel-size", "2"]),
    "DP2, overlap": (
        2,
        ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
    ),
}
Seen = list[dict[str, torch.Tensor]]  # of each micro-batch of the updates


def watched(rank: int, argv: list[str]) -> Seen:
    """Train, and keep what the loss of each micro-batch was made of."""
    return watched_to_the_end(rank, argv)[0]


def watched_to_the_end(rank: int, argv: list[str]) -> tuple[Seen, dict[str, torch.Tensor]]:
    """As `watched`; the second result has the weights at the end."""
    from megatron_r3.train import step

    seen: Seen = []
    made = step.terms_of

    def keep(*given: Any) -> Any:
        terms = made(*given)
        fields = (terms.mask_BS, terms.old_logprobs_BS, terms.logprobs_BS)
        names = ("mask", "old", "new")
        seen.append({n: f.detach().clone() for n, f in zip(names, fields, strict=True)})
        return terms

    step.terms_of = keep
    return seen, train(rank, argv)


def on_response(seen: Seen, name: str) -> list[torch.Tensor]:
    return [one[name][one["mask"] > 0] for one in seen]


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "TP2 SP"))
def test_the_old_policy_is_the_trainer_before_the_first_update(patched, policy, tmp_path, layout):
    ranks, more = LAYOUTS[layout]
    argv = steps_on(policy, stores(policy, tmp_path, mixed=True), 4, *TWO, *more)
    for seen in patched.run(watched, ranks, argv, timeout_s=240):
        if not seen:  # not the last stage
            continue
        per_step = len(seen) // 4
        old, new = on_response(seen, "old"), on_response(seen, "new")
        for step in range(4):
            for i in range(step * per_step, (step + 1) * per_step):
                if not len(old[i]):  # a rank of CP may hold the prompts alone
                    assert layout == "CP2"
                    continue
                # in the first of the two updates the weights are those of the pass
                assert torch.equal(old[i], new[i]) == (step % 2 == 0), (step, i)


def test_one_update_needs_no_pass(patched: TreeWorker, policy: Policy, tmp_path: Path) -> None:
    argv = steps_on(policy, stores(policy, tmp_path, mixed=True), 2, *TRAINER)
    (seen,) = patched.run(watched, 1, argv, timeout_s=120)
    assert all(torch.equal(one["old"], one["new"]) for one in seen)
    (sampler,) = patched.run(watched, 1, steps_on(policy, tmp_path / "store", 2), timeout_s=120)
    assert not any(torch.equal(one["old"], one["new"]) for one in sampler)  # control


FOUR = [*TRAINER, "--rollouts-mini-steps", "4"]


@dataclass
class Interrupted:
    """A training of four updates on one collection, and one that ended after two of them.

    Attributes:
        store: the rollouts.
        saved: the checkpoint after two updates, and the old policy's record.
        seen, weights: of the training that was not interrupted.
    """

    store: Path
    saved: Path
    seen: Seen
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def interrupted(
    patched: TreeWorker, policy: Policy, tmp_path_factory: pytest.TempPathFactory
) -> Interrupted:
    folder = tmp_path_factory.mktemp("interrupted")
    argv = steps_on(policy, stores(policy, folder, mixed=True), 4, *FOUR)
    (whole,) = patched.run(watched_to_the_end, 1, argv, timeout_s=120)
    saved = ["--save", str(folder / "saved"), "--save-interval", "2", "--exit-interval", "2"]
    patched.run(train, 1, [*argv, *saved], timeout_s=120)
    return Interrupted(folder / "store", folder / "saved", *whole)


def test_a_training_goes_on_in_the_middle_of_a_collection(patched, policy, interrupted, tmp_path):
    saved = shutil.copytree(interrupted.saved, tmp_path / "saved")
    argv = resumed(policy, interrupted.store, saved, *FOUR)
    assert same([interrupted.weights], patched.run(train, 1, argv, timeout_s=120))
    shutil.rmtree(saved / "old-policy")
    assert "checkpoint was saved in the middle of a collection" in fails(patched, argv)


def test_other_ranks_read_what_one_rank_wrote(patched, policy, interrupted):
    argv = resumed(policy, interrupted.store, interrupted.saved, *FOUR)
    ranks, more = LAYOUTS["PP2 VPP2"]
    results = patched.run(watched, ranks, [*argv, *more], timeout_s=120)
    (got,) = (seen for seen in results if seen)  # of the last stage
    want = interrupted.seen[len(interrupted.seen) // 2 :]
    for one, other in zip(got, want, strict=True):
        on_T = one["mask"] > 0
        assert torch.equal(on_T, other["mask"] > 0)
        assert torch.equal(one["old"][on_T], other["old"][on_T])
        assert not torch.equal(one["old"][on_T], one["new"][on_T])  # control


FULL = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
FULL += ["--recompute-num-layers", "1"]
BLOCK = ["--recompute-granularity", "full", "--recompute-method", "block"]
BLOCK += ["--recompute-num-layers", "2"]
MOE = ["--recompute-granularity", "selective", "--recompute-modules", "moe"]
RECOMPUTES = {"full": FULL, "block": BLOCK, "moe": MOE}


# every recompute, and every source, but not each with each
@pytest.mark.parametrize(
    ("recompute", "source"),
    [
        *(("block", source) for source in SOURCES),
        slow("full", "old-policy"),
        slow("moe", "rollout"),
    ],
)
def test_a_recompute_does_not_move_the_ratio(patched, policy, tmp_path, recompute, source):
    argv = steps_on(policy, stores(policy, tmp_path, mixed=True), 2, *TWO, *RECOMPUTES[recompute])
    argv += ["--moe-router-replay-source", source]
    (seen,) = patched.run(watched, 1, argv, timeout_s=120)
    pairs = [*zip(on_response(seen, "old"), on_response(seen, "new"), strict=True)]
    first, second = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
    assert all(torch.equal(old, new) for old, new in first)
    assert not any(torch.equal(old, new) for old, new in second)
