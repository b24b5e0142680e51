"""`make gpu`: run the steps of steps.py on the GPU of this machine, and record each as it ends.

    python -m proof.gpu.run --megatron TREE --demo DIR --out RESULTS [--site SITE] [--minutes M]
    python -m proof.gpu.run --megatron TREE --demo DIR --out RESULTS --rehearse

TREE is a patched Megatron-LM; DIR is the folder of `make demo`, with its checkpoint and rollouts.
RESULTS gets one file for each GPU and day, with the records of the steps by name, and under "steps"
how each step ended. RESULTS/logs has all output of each step. A step that has a result is not run
again, so a later call continues where an earlier call stopped. SITE is the folder into which
proof/gpu/unpack installed packages.

Exit status: 0 every step has a result and none failed; 1 a step failed or timed out; 2 the CUDA
device, the tree or the demo's files are missing; 4 steps are left for another call; 130 stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_r3.loop.processes import signals_raise, start, stop
from proof.benchmarks.machine import RECORD_SUFFIX, results_file, write_results
from proof.gpu.steps import STEPS, Places, Step

ROOT = Path(__file__).parents[2]
SKIPPED, LEFT = 77, 4
# A rehearsed step may take this many times its limit, since other programs use the CPU too.
REHEARSAL_PATIENCE = 5
# This runs in a process of its own: a CUDA context in this process would take memory of the GPU.
FACTS = """
import json, sys
from proof.benchmarks.machine import device_of, machine_of, no_transformer_engine
import torch
device = sys.argv[1]
if device == "cuda" and not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} finds no CUDA device here")
print(json.dumps({**machine_of(), **device_of(device), "no_te": no_transformer_engine()}))
"""
RECORDS = "*-[0-9][0-9].json"  # one file for each GPU and day
Row = dict[str, Any]


def main(argv: list[str] | None = None, steps: Sequence[Step] = STEPS) -> int:
    """Run the steps that have no result; return the exit status."""
    args = _arguments(argv)
    args.out = args.out.resolve()
    try:
        places = Places.of(args.megatron, args.demo)
        facts = facts_of(args, places)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    rows: dict[str, Row] = {}  # by name, how each step ended, in this call or an earlier one
    for file in sorted(args.out.glob(RECORDS)):
        rows |= json.loads(file.read_text()).get("steps", {})
    until = time.time() + 60 * args.minutes
    try:
        with signals_raise():
            for step in steps:
                if step.name not in rows and (row := take(step, facts, places, args, until)):
                    rows[step.name] = row
                    _record(rows, facts, places, args)
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return 130
    print(f"results: {args.out}", *(line_of(name, row) for name, row in rows.items()), sep="\n")
    if left := [step.name for step in steps if step.name not in rows]:
        print(f"left for another call: {', '.join(left)}")
        return LEFT
    return int(any(row["status"] in ("failed", "timed out") for row in rows.values()))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu", description=str(__doc__).splitlines()[0])
    parser.add_argument("--megatron", type=Path, required=True, help="a patched Megatron-LM")
    parser.add_argument("--demo", type=Path, required=True, help="the folder that make demo made")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the results")
    parser.add_argument("--site", type=Path, help="where proof/gpu/unpack installed packages")
    hint = "of this call; a step that may take longer is left for another call (default: no limit)"
    parser.add_argument("--minutes", type=float, default=float("inf"), help=hint)
    parser.add_argument("--rehearse", action="store_true", help="every step tiny, on the CPU")
    return parser.parse_args(argv)


def facts_of(args: argparse.Namespace, places: Places) -> Row:
    """What the records say of the machine and its device.

    Raises:
        ValueError: torch finds no CUDA device, or cannot be imported.
    """
    asked = subprocess.run(
        [sys.executable, "-c", FACTS, "cpu" if args.rehearse else "cuda"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment(args, places, with_te=True)},
        cwd=ROOT,
    )
    if asked.returncode:
        said = asked.stderr.strip().splitlines()[-1]
        raise ValueError(f"{said}; --rehearse runs every step tiny on the CPU")
    return dict(json.loads(asked.stdout.splitlines()[-1]))


def environment(args: argparse.Namespace, places: Places, with_te: bool) -> dict[str, str]:
    """The variables that a step's process gets besides those of this process.

    Only a step that needs Transformer Engine sees the one of --site. Every step sees a Transformer
    Engine that is installed in this Python itself.
    """
    paths = [ROOT, places.tree]
    if args.site is not None:
        site = args.site.resolve()
        paths += [site, site.with_name(f"{site.name}-te")] if with_te else [site]
    env = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONUNBUFFERED": "1"}
    return {**env, "OMP_NUM_THREADS": "1"} if args.rehearse else env


def take(
    step: Step, facts: Row, places: Places, args: argparse.Namespace, until: float
) -> Row | None:
    """Run a step, and return how it ended; None if it is left for another call."""
    no_te = "a rehearsal has no Transformer Engine" if args.rehearse else facts["no_te"]
    if step.needs_te and no_te and not (args.rehearse and step.rehearsal):
        row = {"status": "skipped", "seconds": 0.0, "reason": no_te, "skipped_cases": {}}
        print(line_of(step.name, row), flush=True)
        return row
    limit_s = step.limit_s * (REHEARSAL_PATIENCE if args.rehearse else 1)
    if time.time() + limit_s > until:
        print(f"{step.name}: left for another call: it may take {limit_s} s", flush=True)
        return None
    print(f"{step.name}: runs, for at most {limit_s} s", flush=True)
    record = ["--out", str(args.out), *(["--rehearse"] * args.rehearse)]
    command = step.rehearsal if args.rehearse and step.rehearsal else step.command
    log, began, status = args.out / "logs" / f"{step.name}.log", time.monotonic(), None
    log.unlink(missing_ok=True)
    env = {**environment(args, places, step.needs_te), RECORD_SUFFIX: step.suffix}
    process = start([sys.executable, "-m", *places.words(command, record)], env, log)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        stop(process)  # and all that the step has started: nothing may run beside the next step
    row = outcome(status, log.read_text(errors="replace"), limit_s)
    row["seconds"] = round(time.monotonic() - began, 1)
    print(line_of(step.name, row), flush=True)
    return row


def outcome(status: int | None, log: str, limit_s: int) -> Row:
    """How a step ended, from its exit status (None: it was ended at its limit) and its output."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    # of a benchmark `skipped: CASE: REASON`, of pytest `SKIPPED [2] FILE:LINE: REASON`
    found = (re.match(r"(?i)skipped(?::| \[\d+\]) (.+?): (.+)", line) for line in lines)
    row: Row = {"skipped_cases": dict(m.groups() for m in found if m)}
    if status is None:
        return row | {
            "status": "timed out",
            "reason": f"it was ended after {limit_s} s",
        }
    if status == SKIPPED and last.startswith("skipped: "):
        reason = last.removeprefix("skipped: ")
        return {"status": "skipped", "reason": reason, "skipped_cases": {}}
    if status or re.match(r"\d+ skipped\b", last):  # pytest ran no test at all
        return row | {"status": "failed", "reason": f"exit status {status}: {last}"}
    return row | {"status": "passed", "reason": last}


def line_of(name: str, row: Row) -> str:
    """The line of a step, and one for each case that it skipped."""
    cases = [f"\n  {case}: skipped: {reason}" for case, reason in row["skipped_cases"].items()]
    return f"{name}: {row['status']}, {row['seconds']} s: {row['reason']}{''.join(cases)}"


def _record(rows: dict[str, Row], facts: Row, places: Places, args: argparse.Namespace) -> None:
    file = results_file(args.out, facts)
    known = json.loads(file.read_text()) if file.exists() else {}
    about = {**facts, "commit": commit_of(ROOT), "megatron": str(places.tree)}
    about["rehearsal"] = args.rehearse
    write_results(file, "steps", {**known, "machine": about, "steps": rows})


def commit_of(checkout: Path) -> str:
    """The commit of a checkout: from the file that proof/gpu/pack wrote, else from git.

    A "+" after the commit says that files differ from the commit. Without git the commit is
    "unknown".
    """
    packed = checkout / "COMMIT"
    if packed.exists():
        return packed.read_text().strip()
    try:
        commit, changed = (
            subprocess.run(["git", *words], cwd=checkout, capture_output=True, text=True).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except OSError:  # there is no git
        return "unknown"
    return (commit.strip() or "unknown") + ("+" if changed else "")


if __name__ == "__main__":
    sys.exit(main())
