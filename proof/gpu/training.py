"""Trainings with replay on a GPU, of one rank, by the training script of a tree.

    python -m proof.gpu.training --cases exactness,recorded --spec te --tree TREE --store DIR \\
        --checkpoint DIR --script TREE/pretrain_gpt.py --out RESULTS
    python -m proof.gpu.training --cases recorded --spec local ... --rehearse

TREE is a patched Megatron-LM of 0.19; DIR are the demo's rollout store and checkpoint. Each case
writes its rows as they come into a file of RESULTS (proof/benchmarks/machine.py), under the name
`training CASE`. On a GPU the layers are Transformer Engine's (--spec te) or Megatron's own (--spec
local); a rehearsal trains Megatron's own, tiny, on the CPU. Exit status: 0 if every row shows what
it must, 1 if a row does not, 77 if every row was skipped, 2 for wrong arguments or a wrong store.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from proof.benchmarks.machine import device_of, machine_of, write_results
from proof.gpu.training_cases import CASES, Rows
from proof.gpu.training_runs import ON_GPU, REHEARSAL, Place, write_stores

SKIPPED = 77


def main(argv: list[str] | None = None) -> int:
    """Run the cases that were asked for; return the exit status."""
    args = _arguments(argv)
    scale = REHEARSAL if args.rehearse else ON_GPU
    args.out.mkdir(parents=True, exist_ok=True)
    about = {**machine_of(), **device_of(args.device), "rehearsal": args.rehearse}
    about |= {"spec": args.spec, "script": args.script.name}
    with tempfile.TemporaryDirectory(prefix="training-") as scratch:
        folder = Path(scratch)
        try:
            stores = write_stores(args.store, folder, scale.rollouts)
        except ValueError as error:  # a StoreError too
            print(f"error: {error}", file=sys.stderr)
            return 2
        place = Place(
            tree=args.tree.resolve(),
            script=args.script.resolve(),
            checkpoint=args.checkpoint.resolve(),
            stores=stores,
            folder=folder,
            te=args.spec == "te",
            cpu=args.rehearse,
            scale=scale,
        )
        rows = [
            row for case in args.cases for row in run(case, CASES[case](place), args.out, about)
        ]
    if all("skipped" in row for row in rows):
        print("skipped: no row of these cases can be measured here")
        return SKIPPED
    failed = [row for row in rows if not row.get("ok", True)]
    done = sum("ok" in row for row in rows)
    print(f"{done - len(failed)} of {done} rows show what they must: {args.out}")
    return 1 if failed else 0


def run(case: str, rows: Rows, out: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one case; print and record each row as it comes."""
    known: list[dict[str, Any]] = []
    begin = time.monotonic()
    for name, fields in rows:
        known.append({"row": name, **fields})
        record = {**about, "seconds": round(time.monotonic() - begin, 1), "rows": known}
        write_results(out, f"training {case}", record)
        if "skipped" in fields:
            print(f"skipped: {case}, {name}: {fields['skipped']}", flush=True)
            continue
        told = {k: v for k, v in fields.items() if k not in ("ok", "seconds", "losses")}
        ok = "ok    " if fields["ok"] else "FAILED"
        print(f"{ok} {case}, {name}: {json.dumps(told)}", flush=True)
    return known


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="training", description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--cases", required=True, help=f"one or several of {','.join(CASES)}")
    add("--tree", type=Path, required=True, help="a patched Megatron-LM of 0.19")
    add("--store", type=Path, required=True, help="the demo's rollout store")
    add("--checkpoint", type=Path, required=True, help="the demo's checkpoint")
    add("--script", type=Path, required=True, help="a training script, such as pretrain_gpt.py")
    add("--out", type=Path, required=True, help="the folder to record in")
    add(
        "--spec",
        choices=("te", "local"),
        required=True,
        help="layers of Transformer Engine, or Megatron's own",
    )
    add("--rehearse", action="store_true", help="tiny trainings, on the CPU")
    args = parser.parse_args(argv)
    if args.rehearse and args.spec == "te":
        parser.error("--rehearse needs --spec local")
    args.device = "cpu" if args.rehearse else "cuda"
    args.cases = args.cases.split(",")
    if unknown := [case for case in args.cases if case not in CASES]:
        parser.error(f"--cases {unknown[0]}: no such case; the cases are {', '.join(CASES)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
