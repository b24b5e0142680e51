"""`make fidelity`: run the cases of the table, print a row for each, write build/fidelity.json.

    python -m proof.fidelity.run --out build/fidelity.json [--megatron DIR] [--quick] [--only TEXT]

Exit status 0 says that every case that the tree can run passed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from megatron_r3.patching.git import PatchingError
from megatron_r3.patching.tree import identify
from megatron_r3.patching.versions import patches_folder, read_versions
from proof.fidelity.cases import CASES, Case
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.table import Table, passed
from proof.fidelity.trees import patched_copy, unpatched_copy

HEAD = (
    f"{'case':38} ranks {'dispatched':>10} {'loss error':>10} {'grad error':>10} bitwise controls"
)


def main(argv: list[str] | None = None) -> int:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(prog="fidelity", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--megatron", type=Path, help="a Megatron-LM checkout (default: the default tree)"
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--quick", action="store_true", help="one case of each kind")
    parser.add_argument("--only", default="", help="cases with this text in their names")
    args = parser.parse_args(argv)
    cases = [c for c in CASES if args.only in c.name and (c.quick or not args.quick)]
    if not cases:
        parser.error(f"no case has {args.only!r} in its name")
    with tempfile.TemporaryDirectory(prefix="fidelity-") as scratch:
        folder = Path(scratch)
        try:
            tree, name = unpatched_copy(args.megatron, folder / "unpatched")
            patched = patched_copy(tree, folder / "patched")
        except PatchingError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        line = identify(patched, read_versions(patches_folder())).line.name
        left_out = [case.name for case in cases if not case.runs_on(patched, line)]
        cases = [case for case in cases if case.runs_on(patched, line)]
        if left_out:
            print(f"cases that {name}, of {line}, cannot run: {', '.join(left_out)}")
        if not cases:
            print(f"error: {name} can run none of these cases", file=sys.stderr)
            return 2
        with TreeWorker(patched, preload=["megatron.training"]) as worker:
            rows = run(cases, Table(worker, folder, name))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(rows, indent=1) + "\n")
    failed = [row["case"] for row in rows if not passed(row)]
    print(f"{len(rows) - len(failed)} of {len(rows)} cases passed, on {name}: {args.out}")
    return 1 if failed else 0


def run(cases: list[Case], table: Table) -> list[dict[str, object]]:
    """Run some cases, print their rows as they come, and return them."""
    print(HEAD, flush=True)
    rows = []
    for case in cases:
        begin = time.monotonic()
        row = table.row(case)
        print(f"{_line(row)}  {time.monotonic() - begin:.1f} s", flush=True)
        rows.append(row)
    return rows


def _line(row: dict[str, object]) -> str:
    head = f"{row['case']:38} {row['world_size']:>5} "
    if "error" in row:  # the JSON file has the whole error
        return f"{head} FAILED: {str(row['error']).strip().splitlines()[-1][:200]}"
    controls = row["controls"]
    assert isinstance(controls, dict)
    missed = [name for name, caught in controls.items() if not caught]
    return (
        f"{head}{row['dispatched_as_recorded']:10.4f} {row['loss_error']:10.1e} "
        f"{row['grad_error']:10.1e} {'' if 'bitwise' not in row else str(row['bitwise']):7} "
        f"{'missed: ' + ', '.join(missed) if missed else 'caught'}"
        + (f", {row['guests_error']:.1e} from without guests" if "guests_error" in row else "")
        + ("" if passed(row) else "  FAILED")
    )


if __name__ == "__main__":
    sys.exit(main())
