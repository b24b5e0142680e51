"""`make gpu`: run the steps of steps.py on the GPU of this machine, and record each as it ends.

    python -m proof.gpu.run --megatron TREE --demo DIR --out RESULTS [--site DIR] [--minutes M]
    python -m proof.gpu.run --megatron TREE --demo DIR --out RESULTS --rehearse

TREE is a patched Megatron-LM, DIR what `make demo` made (its checkpoint and its rollouts). RESULTS
gets one file for each GPU and day, with the records of the steps by name, and under "steps" how
each step ended; and logs/, with all output of each. A step that has a result is not run again, so
that a later call goes on where one stopped.

Exit status: 0 every step has a result and none failed; 1 a step failed or timed out; 2 there is no
CUDA device, or something that a step needs; 4 steps are left for another call.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_r3.loop.processes import signals_raise, start, stop
from proof.benchmarks.machine import RECORD_SUFFIX, results_file, write_results
from proof.gpu.steps import EXPECTED_SKIPS, STEPS, Places, Step

ROOT = Path(__file__).parents[2]
SKIPPED, LEFT = 77, 4
# how many times a step's limit a rehearsal may take, on a CPU that others use too
REHEARSAL_PATIENCE = 5
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
    """Run the steps that have no result."""
    args = _arguments(argv)
    places = Places.of(args.megatron, args.demo)
    if missing := places.missing():
        print(f"error: {missing}", file=sys.stderr)
        return 2
    session = Session(places, args)
    try:
        facts = session.facts()
    except ValueError as error:
        print(f"error: {error}; --rehearse runs every step tiny on the CPU", file=sys.stderr)
        return 2
    try:
        with signals_raise():
            for step in steps:
                if step.name not in session.rows:
                    session.take(step, facts)
    except KeyboardInterrupt:
        print("stopped: call this again to go on", file=sys.stderr)
        return 130
    return session.summary(steps)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu", description=str(__doc__).splitlines()[0])
    parser.add_argument("--megatron", type=Path, required=True, help="a patched Megatron-LM")
    parser.add_argument("--demo", type=Path, required=True, help="what make demo made")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the results")
    parser.add_argument("--site", type=Path, help="where proof/gpu/unpack installed packages")
    hint = "a step whose limit does not fit into the rest is left for another call (default: all)"
    parser.add_argument("--minutes", type=float, default=float("inf"), help=hint)
    parser.add_argument("--rehearse", action="store_true", help="every step tiny, on the CPU")
    return parser.parse_args(argv)


class Session:
    """The steps of one call.

    Attributes:
        rows: how each step ended, by its name, those of earlier calls too.
    """

    def __init__(self, places: Places, args: argparse.Namespace) -> None:
        self.places, self.rehearse, self.site = places, args.rehearse, args.site
        self.results: Path = args.out.resolve()
        self.until = time.time() + 60 * args.minutes
        (self.results / "logs").mkdir(parents=True, exist_ok=True)
        self.rows: dict[str, Row] = {}
        for file in sorted(self.results.glob(RECORDS)):
            self.rows |= json.loads(file.read_text()).get("steps", {})

    def facts(self) -> Row:
        """The machine and its device, asked in a process of its own.

        This process stays without CUDA, since a context takes memory of the device.

        Raises:
            ValueError: there is no device.
        """
        argv = [sys.executable, "-c", FACTS, "cpu" if self.rehearse else "cuda"]
        environment = {**os.environ, **self._environment()}
        asked = subprocess.run(
            argv, capture_output=True, text=True, check=False, env=environment, cwd=ROOT
        )
        if asked.returncode:
            raise ValueError(asked.stderr.strip().splitlines()[-1])
        return dict(json.loads(asked.stdout.splitlines()[-1]))

    def take(self, step: Step, facts: Row) -> None:
        """Run a step and record how it ended; or leave it for another call."""
        if reason := self._why_skip(step, facts):
            row: Row = {"status": "skipped", "seconds": 0.0, "reason": reason}
        else:
            limit_s = step.limit_s * (REHEARSAL_PATIENCE if self.rehearse else 1)
            if time.time() + limit_s > self.until:
                print(f"{step.name}: left for another call: it may take {limit_s} s", flush=True)
                return
            print(f"{step.name}: runs, for at most {limit_s} s", flush=True)
            row = self._run(step, limit_s)
        self.rows[step.name] = row
        reason = f": {row['reason']}" if row["reason"] else ""
        print(f"{step.name}: {row['status']}, {row['seconds']} s{reason}", flush=True)
        file = results_file(self.results, facts)
        known = json.loads(file.read_text()) if file.exists() else {}
        about = {**facts, "commit": commit_of(ROOT), "megatron": str(self.places.tree)}
        about["rehearsal"] = self.rehearse
        write_results(file, "steps", {**known, "machine": about, "steps": self.rows})

    def _why_skip(self, step: Step, facts: Row) -> str:
        if not step.needs_te:
            return ""
        if self.rehearse:
            return "" if step.rehearsal else "a rehearsal has no Transformer Engine"
        return facts["no_te"] or ""

    def _run(self, step: Step, limit_s: int) -> Row:
        given = step.rehearsal if self.rehearse and step.rehearsal else step.arguments
        command = [sys.executable, "-m", step.module, *self.places.words(given)]
        command += ["--out", str(self.results)]
        command += ["--device", "cpu", "--rehearse"] if self.rehearse else []
        log = self.results / "logs" / f"{step.name}.log"
        log.unlink(missing_ok=True)
        started = time.monotonic()
        process = start(command, self._environment(step), log)
        status: int | None = None
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            stop(process)  # with all that it has started: nothing may run beside the next step
        seconds = round(time.monotonic() - started, 1)
        return {**outcome(status, log.read_text(errors="replace"), limit_s), "seconds": seconds}

    def _environment(self, step: Step | None = None) -> dict[str, str]:
        """What a step's process has beside this one's environment; of a look, without one."""
        paths = [ROOT, self.places.tree]
        if self.site is not None:
            paths.append(self.site.resolve())
            # The other steps run without Transformer Engine, as on a machine that has none. What
            # this Python has installed by itself, they see.
            if step is None or step.needs_te:
                paths.append(self.site.resolve().with_name(f"{self.site.name}-te"))
        env = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONUNBUFFERED": "1"}
        env |= {"OMP_NUM_THREADS": "1"} if self.rehearse else {}
        return env if step is None else {**env, RECORD_SUFFIX: step.suffix}

    def summary(self, steps: Sequence[Step]) -> int:
        """Print a line for each step; return the exit status."""
        for line in table(self.rows):
            print(line)
        print(f"results: {self.results}")
        if left := [step.name for step in steps if step.name not in self.rows]:
            print(f"left for another call: {', '.join(left)}")
            return LEFT
        wrong = complaints(self.rows, steps) if self.rehearse else []
        for line in wrong:
            print(f"error: {line}", file=sys.stderr)
        failed = any(row["status"] in ("failed", "timed out") for row in self.rows.values())
        return int(failed or bool(wrong))


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, from what proof/gpu/pack wrote, or from git; "unknown" without.

    A "+" behind the commit says that files were changed since.
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


def outcome(status: int | None, log: str, limit_s: int) -> Row:
    """How a step ended, from its exit status (None: it was ended at its limit) and its output."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    # `skipped: CASE: REASON`; a reason may have a colon in it, and a case has none
    cases = dict(m.groups() for line in lines if (m := re.match(r"skipped: ([^:]+): (.+)", line)))
    row: Row = {"status": "passed", "reason": "", "skipped_cases": cases}
    if status is None:
        return row | {"status": "timed out", "reason": f"it was ended after {limit_s} s"}
    if status == SKIPPED and last.startswith("skipped: "):
        reason = last.removeprefix("skipped: ")
        return row | {"status": "skipped", "reason": reason, "skipped_cases": {}}
    if status:
        return row | {"status": "failed", "reason": f"exit status {status}: {last}"}
    return row


def table(rows: Mapping[str, Row]) -> list[str]:
    """The summary: a line for each step, and one for each case that it skipped."""
    lines = [f"{'step':16} {'status':10} {'seconds':>8}  reason"]
    for name, row in rows.items():
        line = f"{name:16} {row['status']:10} {row['seconds']:>8.1f}  {row['reason']}"
        lines.append(line.rstrip())
        for case, reason in row.get("skipped_cases", {}).items():
            lines.append(f"  {case}: skipped: {reason}")
    return lines


def complaints(rows: Mapping[str, Row], steps: Sequence[Step] = STEPS) -> list[str]:
    """What a rehearsal skipped that it need not, or did not skip that it must."""
    names = {step.name for step in steps}
    expected = {skip for skip in EXPECTED_SKIPS if skip.partition("/")[0] in names}
    skipped = {name for name, row in rows.items() if row["status"] == "skipped"}
    for name, row in rows.items():
        skipped |= {f"{name}/{case}" for case in row.get("skipped_cases", ())}
    where = "EXPECTED_SKIPS of proof/gpu/steps.py"
    wrong = [f"{name} was skipped, and is not in {where}" for name in sorted(skipped - expected)]
    return wrong + [
        f"{name} is in {where}, and was not skipped" for name in sorted(expected - skipped)
    ]


if __name__ == "__main__":
    sys.exit(main())
