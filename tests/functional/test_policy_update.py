"""The policy update inside Megatron's own training loop, in every layout, against one process.

The reference (`policy_reference.py`) takes each rollout alone through the model, and its losses are
those of the papers, written down by themselves in float64. A second time it computes them from the
layout's own log-probs, so that rounding in the model does not count.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from policy_reference import Recipe, Update, judge, make_updates, run_and_keep

from megatron_r3.data.store import RolloutStore
from megatron_r3.train.dataset import PackedRollouts
from megatron_r3.train.losses.correction import CorrectionOptions
from megatron_r3.train.losses.loss import LossOptions
from megatron_r3.train.losses.penalty import PenaltyOptions
from megatron_r3.train.losses.policy_loss import Clip
from megatron_r3.train.schedule import Schedule, UseOfRollouts
from proof.fidelity.cases import CP2, EP2, PACK, PP2, TP2
from proof.fidelity.gradients import assemble
from proof.fidelity.judge import gradient_error
from proof.fidelity.models import MODELS
from proof.fidelity.observe import RankResult
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.rollouts import NUM_ROLLOUTS, Sampled, make_rollouts, write_stores

MODEL = MODELS["base"]
# The largest relative error of what is computed from log-probs, in float32.
EXACT = 1e-6
PER_TOKEN = "--calculate-per-token-loss"
TRAINER = "--rollouts-old-policy trainer"
# The rollouts' log-probs are some tenths away from the model's: these ranges clip a part of them.
RECIPES = {
    "gspo": Recipe(
        "--rollouts-loss gspo --rollouts-aggregation sequence-mean "
        "--rollouts-clip-eps 0.05 --rollouts-clip-eps-high 0.06",
        LossOptions("gspo", Clip(0.05, 0.06), "sequence-mean"),
    ),
    "grpo": Recipe(
        "--rollouts-aggregation fixed-length --rollouts-fixed-length 50 "
        "--rollouts-clip-eps-high 0.28 --rollouts-dual-clip 1.3",
        LossOptions("grpo", Clip(0.2, 0.28, 1.3), "fixed-length", 50),
    ),
    "cispo": Recipe(
        "--rollouts-loss cispo --rollouts-advantages group-centred --rollouts-clip-eps 0.3",
        LossOptions("cispo", Clip(0.3, 0.3)),
        centred=True,
    ),
    "tis": Recipe(
        f"{TRAINER} --rollouts-correction tis --rollouts-correction-level sequence",
        LossOptions(correction=CorrectionOptions("tis", "sequence", 0.0, 2.0)),
        trainer_is_old=True,
    ),
    "mask": Recipe(
        f"{TRAINER} --rollouts-correction mask --rollouts-correction-bounds 0.7 1.4 "
        "--rollouts-aggregation sequence-mean",
        LossOptions(
            aggregation="sequence-mean", correction=CorrectionOptions("mask", "token", 0.7, 1.4)
        ),
        trainer_is_old=True,
    ),
    "kl": Recipe(
        "--rollouts-kl-coeff 0.7 --rollouts-entropy-coeff 0.2",
        LossOptions(penalty=PenaltyOptions(0.7, entropy=0.2)),
        reference=True,
    ),
    "kl in advantages": Recipe(
        f"{TRAINER} --rollouts-loss gspo --rollouts-kl-coeff 0.7 --rollouts-kl k1 "
        "--rollouts-kl-in advantage --rollouts-clip-eps 0.05 --rollouts-clip-eps-high 0.06",
        LossOptions(
            "gspo",
            Clip(0.05, 0.06),
            "sequence-mean",
            penalty=PenaltyOptions(0.7, "k1", "advantage"),
        ),
        trainer_is_old=True,
        reference=True,
    ),
}
# Without --calculate-per-token-loss Megatron averages the averages of the micro-batches.
AVERAGED = {
    f"{name}, averaged": replace(RECIPES[name], micro_batch=2) for name in ("cispo", "mask")
}
LAYOUTS = {
    "1": (1, ""),
    "TP2+SP": (2, TP2),
    "CP2": (2, CP2),
    "PP2": (2, PP2),
    "DP2": (2, ""),
    "packs": (1, PACK),
    "packs, CP2": (2, f"{PACK} {CP2}"),
    "EP2": (2, EP2),
}
ONE_EACH = {"1": "gspo", "TP2+SP": "grpo", "PP2": "tis", "DP2": "mask", "EP2": "cispo"}
CASES = [
    *((layout, name) for layout, name in ONE_EACH.items()),
    *((layout, "kl") for layout in ("1", "TP2+SP", "PP2", "DP2", "packs")),
    *(("CP2", name) for name in RECIPES),
    *(pytest.param("packs", name, marks=pytest.mark.slow) for name in RECIPES),
    ("packs, CP2", "gspo"),
    ("packs, CP2", "mask"),
    *(("CP2", f"{name}, averaged") for name in ("cispo", "mask")),
]


@dataclass(frozen=True)
class Prepared:
    checkpoint: Path
    store: Path
    rollouts: list[Sampled]
    updates: dict[str, Update]


def with_turns(sampled: Sampled) -> Sampled:
    """The rollout with a word of a user in each of its responses, after three tokens of its own."""
    first = int(sampled.response.argmax())
    response = sampled.response.copy()
    response[first + 3 : first + 5] = False
    return replace(sampled, response=response, logprobs=np.where(response, sampled.logprobs, 0.0))


@pytest.fixture(scope="module")
def prepared(patched: TreeWorker, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("policy-update")
    rollouts = [with_turns(sampled) for sampled in make_rollouts(MODEL)]
    (updates,) = patched.run(
        make_updates,
        1,
        [*MODEL.argv(), "--micro-batch-size", "1"],
        rollouts,
        folder / "checkpoint",
        {**RECIPES, **AVERAGED},
        timeout_s=180,
    )
    store = write_stores(MODEL, rollouts, folder)["right"]
    return Prepared(folder / "checkpoint", store, rollouts, updates)


def trained(
    worker: TreeWorker, prepared: Prepared, layout: str, recipe: Recipe, log: Path
) -> list[tuple[RankResult, np.ndarray]]:
    """One step of Megatron's loop; the learning rate is too small to change a weight."""
    ranks, arguments = LAYOUTS[layout]
    argv = [a for a in MODEL.argv() if a != PER_TOKEN or recipe.micro_batch is None]
    size, samples = 2, NUM_ROLLOUTS
    if "packs" in layout:
        use = UseOfRollouts(64, Schedule(1))
        packs = PackedRollouts(RolloutStore([prepared.store]), use, None, 4 if ranks > 1 else 1)
        size, samples = 1, len(packs.packs)
    argv += shlex.split(f"{arguments} {recipe.options}")
    argv += ["--load", str(prepared.checkpoint), "--finetune", "--no-load-optim", "--no-load-rng"]
    argv += ["--exit-on-missing-checkpoint", "--eval-iters", "0", "--train-iters", "1"]
    argv += ["--micro-batch-size", str(size), "--global-batch-size", str(samples)]
    argv += ["--rollouts", str(prepared.store), "--moe-router-replay"]
    if recipe.reference:
        argv += ["--rollouts-reference", str(prepared.checkpoint.with_name("reference"))]
    argv += ["--lr", "1e-30", "--min-lr", "0", "--log-interval", "1", "--clip-grad", "0"]
    argv += ["--moe-router-replay-verify-dispatch", "--rollouts-log", str(log)]
    return worker.run(run_and_keep, ranks, argv, {"right": prepared.store}, timeout_s=180)


@pytest.mark.parametrize(("layout", "name"), CASES, ids=lambda value: value)
def test_an_update_is_that_of_one_process_and_of_the_papers(
    patched: TreeWorker, prepared: Prepared, layout: str, name: str, tmp_path: Path
) -> None:
    want, recipe = prepared.updates[name], {**RECIPES, **AVERAGED}[name]
    pairs = trained(patched, prepared, layout, recipe, tmp_path / "log.jsonl")
    results, kept = [result for result, _ in pairs], [terms for _, terms in pairs]
    got = assemble([piece for r in results for piece in r.gradients["right"]])
    assert gradient_error(got, assemble(want.gradients)) <= MODEL.tolerance
    (loss,) = {r.losses["right"] for r in results if r.losses}
    line = json.loads((tmp_path / "log.jsonl").read_text())

    def errors(update: Update) -> list[float]:
        kl = line["update/reference kl"] if recipe.reference else update.kl
        ratios = kl / update.kl, line["update/entropy"] / update.entropy
        return [abs(loss - update.loss) / update.scale, *(abs(ratio - 1) for ratio in ratios)]

    own, gradient = judge(prepared.rollouts, recipe, kept)
    assert max(*errors(own), gradient, errors(want)[0]) <= EXACT
    assert max(errors(want)) <= MODEL.tolerance
    # control: each token has the terms of another one
    moved = [np.hstack([one[:, :1], np.roll(one[:, 1:], 1, 0)]) for one in kept]
    assert judge(prepared.rollouts, recipe, moved)[1] > EXACT
    if recipe.reference:  # control: another coefficient
        penalty = replace(recipe.loss.penalty, kl=1.001 * recipe.loss.penalty.kl)
        wrong = replace(recipe, loss=replace(recipe.loss, penalty=penalty))
        other, gradient = judge(prepared.rollouts, wrong, kept)
        assert min(errors(other)[0], gradient) > EXACT
    for control, wrong in want.controls.items():
        assert gradient_error(got, assemble(wrong)) > 1e-2, control
    # Where micro-batches have as many rollouts each, an average of averages may be the same.
    for other in RECIPES.keys() - {name.removesuffix(", averaged")}:
        assert gradient_error(got, assemble(prepared.updates[other].gradients)) > 1e-2, other


def test_an_average_of_averages_is_another_update(prepared: Prepared) -> None:
    one, other = (assemble(prepared.updates[n].gradients) for n in ("cispo", "cispo, averaged"))
    assert gradient_error(one, other) > 1e-2
