"""Run the cases on one tree; the checkpoint, rollouts and reference of a model are made once."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_r3.data.store.reader import RolloutStore
from megatron_r3.train.dataset import PackedRollouts
from megatron_r3.train.options import document_multiple
from megatron_r3.train.schedule import Schedule, UseOfRollouts
from proof.fidelity.cases import CASES, Case
from proof.fidelity.gradients import assemble
from proof.fidelity.judge import Judge, gradient_error
from proof.fidelity.layout import run_layout
from proof.fidelity.lora import with_adapters
from proof.fidelity.models import MODELS, Model
from proof.fidelity.observe import RankResult
from proof.fidelity.reference import CLIP_EPS, make_reference
from proof.fidelity.rig.rank_process import RankError
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.rollouts import CONTROLS, NUM_ROLLOUTS, make_rollouts, write_stores

TIMEOUT_S = 180.0
ANY_GUEST = "--moe-router-replay-guest-tokens 1"
NO_GUESTS = f"--moe-router-replay-guest-tokens {1 << 40}"
# With a guest, an expert's gradient is the sum of two matrix products, so it rounds otherwise.
GUESTS_TOLERANCE = 2e-6
BIAS, GUESTS = "expert_bias_matches", ("guests_match", "guests_came")


@dataclass(frozen=True)
class _Prepared:
    checkpoint: Path
    stores: dict[str, Path]
    judge: Judge


class Table:
    """Makes the rows of the fidelity table.

    Args:
        worker: a worker on a patched tree.
        folder: takes checkpoints and stores.
        tree: the name of the tree in the rows.
    """

    def __init__(self, worker: TreeWorker, folder: Path, tree: str) -> None:
        self.worker, self.folder, self.tree = worker, folder, tree
        self._models: dict[str, _Prepared] = {}
        self._gradients: dict[str, dict[str, torch.Tensor]] = {}

    def row(self, case: Case) -> dict[str, object]:
        """Run a case; return its results, or the `error` that ended it."""
        row: dict[str, object] = {"case": case.name, "tree": self.tree, "world_size": case.ranks}
        try:
            results = self._run(case, f"{case.guests} {ANY_GUEST}" if case.guests else "")
            row |= self._prepared(case.model).judge.row(results)
            if case.bitwise:
                row["bitwise"] = self._is_bitwise(results, case.bitwise)
            if case.recomputes or case.forward_only_first:
                row["every_pass_seen"] = row["passes"] == ["grad", "no grad"]
            if case.guests:
                row |= self._beside_others(case, results)
        except (RankError, AssertionError) as error:
            row["error"] = str(error)
        return row

    def _beside_others(self, case: Case, results: list[RankResult]) -> dict[str, object]:
        """Compare the run with guests, and a run with empty slots, with a run without slots.

        In bfloat16, gradients with and without guests need not be close to each other: the run with
        guests is compared with the reference alone.
        """
        assert not case.bitwise, "a case with guests may not name another case in `bitwise`"
        plain, empty = (
            _gradients(self._run(case, options)) for options in ("", f"{case.guests} {NO_GUESTS}")
        )
        error = gradient_error(_gradients(results), plain)
        model = MODELS[case.model]
        has_guests = any(o.guests for r in results for o in r.seen["right"])
        return {
            "guests_error": error,
            "guests_match": error <= GUESTS_TOLERANCE or model.tolerance > Model.tolerance,
            # a micro-batch with missing rows has no dispatch plan, and so no guests
            "guests_came": has_guests != bool(model.holes),
            "bitwise": all(torch.equal(empty[name], plain[name]) for name in plain),
        }

    def _run(self, case: Case, options: str = "") -> list[RankResult]:
        prepared = self._prepared(case.model)
        model, update = MODELS[case.model], MODELS[case.model].update
        argv = model.argv() + shlex.split(f"{case.arguments} {options}")
        argv += ["--load", str(prepared.checkpoint), "--finetune"]
        argv += ["--no-load-optim", "--no-load-rng", "--exit-on-missing-checkpoint"]
        argv += ["--micro-batch-size", str(case.micro_batch_size)]
        samples, rest = divmod(_batch_size(argv, prepared.stores["right"]), update.mini_steps)
        assert not rest, f"the number of samples is no multiple of {update.mini_steps} mini-steps"
        argv += ["--global-batch-size", str(samples)]
        if "--eval-iters" not in argv:
            argv += ["--eval-iters", "0"]
        argv += ["--rollouts", str(prepared.stores["right"]), "--moe-router-replay"]
        steps = len(prepared.stores) * update.mini_steps
        argv += ["--rollouts-clip-eps", str(CLIP_EPS), "--train-iters", str(steps)]
        argv += ["--lr", "1e-30", "--min-lr", "0", "--log-interval", "1", *update.argv()]
        argv += ["--moe-router-replay-verify-dispatch", "--moe-router-replay-verify-plan"]
        return self.worker.run(
            with_adapters,
            case.ranks,
            model.adapters,
            run_layout,
            argv,
            prepared.stores,
            case.forward_only_first,
            self.worker.tree / case.script if case.script else None,
            update.mini_steps,
            timeout_s=TIMEOUT_S,
        )

    def _prepared(self, name: str) -> _Prepared:
        if name not in self._models:
            model, folder = MODELS[name], self.folder / name.replace(" ", "-")
            rollouts = make_rollouts(model)
            argv = [*model.argv(), "--micro-batch-size", "1"]
            (reference,) = self.worker.run(
                with_adapters,
                1,
                model.adapters,
                make_reference,
                argv,
                rollouts,
                folder / "checkpoint",
                model.update,
                timeout_s=TIMEOUT_S,
            )
            # Mini-steps move the weights. A later phase with wrong routes would differ for that
            # reason alone, so there is none.
            controls = (*CONTROLS,) if model.update.mini_steps == 1 else ()
            stores = write_stores(model, rollouts, folder)
            self._models[name] = _Prepared(
                folder / "checkpoint",
                {phase: stores[phase] for phase in ("right", *controls)},
                Judge(rollouts, reference, model.tolerance, controls),
            )
        return self._models[name]

    def _is_bitwise(self, results: list[RankResult], other: str) -> bool:
        """Whether the gradients are those of another case, to the last bit."""
        if other not in self._gradients:
            (case,) = (c for c in CASES if c.name == other)
            self._gradients[other] = _gradients(self._run(case))
        got, want = _gradients(results), self._gradients[other]
        return got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)


def _gradients(results: list[RankResult]) -> dict[str, torch.Tensor]:
    return assemble([piece for result in results for piece in result.gradients["right"]])


def _batch_size(argv: list[str], store: Path) -> int:
    """How many samples all rollouts make: packs with --rollouts-pack, else rollouts."""
    if "--rollouts-pack" not in argv:
        return NUM_ROLLOUTS
    # maps each word to the next word; where an option is given twice, the last value stays
    value = dict(itertools.pairwise(argv))
    multiple = document_multiple(int(value.get("--context-parallel-size", 1)))
    use = UseOfRollouts(int(value["--seq-length"]), Schedule(1))
    packed = PackedRollouts(RolloutStore([store]), use, None, multiple)
    return len(packed.packs)


def passed(row: dict[str, object]) -> bool:
    """Whether every field of a row is as it must be."""
    controls = row.get("controls")
    return (
        "error" not in row
        and row["dispatched_as_recorded"] == row["verify_dispatch"] == 1.0
        and bool(row["loss_matches"] and row["grads_match"])
        and bool(controls)
        and isinstance(controls, dict)
        and all(controls.values())
        and all(row.get(name, True) for name in ("bitwise", "every_pass_seen", BIAS, *GUESTS))
    )
