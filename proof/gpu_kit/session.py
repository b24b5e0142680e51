"""Runs the steps of steps.py, each with its own time limit, and records how each ended.

    python -m proof.gpu_kit.session --into DIR [--until EPOCH] [--out RESULTS] [--rehearse]

DIR is where proof/gpu_kit/unpack.py put the kit; that script starts this program. The results are
in DIR/results: one file for each GPU and day, with the records of the steps by name, and under
"steps" how each step ended; and logs/, with all output of each. After each step they are copied to
RESULTS. A step that has a result is not run again, so that a later call goes on where one stopped.

Exit status: 0 every step has a result and none failed; 1 a step failed or timed out; 2 there is no
CUDA device; 4 steps are left for another call.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from proof.benchmarks.machine import RECORD_SUFFIX, results_file, write_results
from proof.gpu_kit import te
from proof.gpu_kit.steps import STEPS, Places, Step

SKIPPED, LEFT = 77, 4
# how many times a step's limit a rehearsal may take, on a CPU that others use too
REHEARSAL_PATIENCE = 5
# Every process of a step has this variable, with the folder of the kit. A rank that torchrun put
# into a session of its own has it too, so that a step is ended whole.
MARK = "MEGATRON_R3_GPU_KIT"
FACTS = """
import json, sys
from proof.benchmarks.machine import device_of, machine_of
import torch
device = sys.argv[1]
if device == "cuda" and not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} finds no CUDA device here")
print(json.dumps({**machine_of(), **device_of(device)}))
"""
# one file for each GPU and day
RECORDS = "*-[0-9][0-9].json"
Row = dict[str, Any]


def main(argv: list[str] | None = None, steps: Sequence[Step] = STEPS) -> int:
    """Start the compile, then run the steps that have no result."""
    args = _arguments(argv)
    # what a shell sends, and what a machine that is taken back sends: end the step, then this
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    into: Path = args.into.resolve()
    facts = machine_facts("cpu" if args.rehearse else "cuda")
    if facts is None:
        return 2
    kit = json.loads((into / "kit" / "kit.json").read_text())
    session = Session(into, kit, facts, args)
    end_processes(into)  # a step of a call that was killed may have outlived it
    try:
        session.start_compile()
        for step in steps:
            if step.name not in session.rows:
                session.take(step)
    except KeyboardInterrupt:
        print("stopped: call this again to go on", file=sys.stderr)
        return 130
    finally:
        end_processes(into)
        session.keep()
    return session.summary(steps)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="session", description=str(__doc__).splitlines()[0])
    parser.add_argument("--into", type=Path, required=True, help="where the kit was unpacked")
    parser.add_argument("--out", type=Path, help="a folder that gets a copy of the results")
    parser.add_argument(
        "--until",
        type=float,
        default=float("inf"),
        help="seconds since 1970: no step is started whose limit goes beyond (default: no end)",
    )
    parser.add_argument("--rehearse", action="store_true", help="every step tiny, on the CPU")
    return parser.parse_args(argv)


def machine_facts(device: str) -> Row | None:
    """The machine and its device, asked in a process of its own; None after an error was printed.

    This process stays without CUDA, since a context takes memory of the device.
    """
    argv = [sys.executable, "-c", FACTS, device]
    asked = subprocess.run(argv, capture_output=True, text=True, check=False)
    if asked.returncode:
        why = asked.stderr.strip().splitlines()[-1]
        print(f"error: {why}; --rehearse runs every step tiny on the CPU", file=sys.stderr)
        return None
    return dict(json.loads(asked.stdout.splitlines()[-1]))


def end_processes(into: Path) -> None:
    """End every process of a step of the kit in `into`."""
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == str(into):
                process.kill()
        except psutil.Error:  # it ended meanwhile, or it belongs to somebody else
            continue


class Session:
    """The steps of one call.

    Attributes:
        rows: how each step ended, by its name, those of earlier calls too.
    """

    def __init__(self, into: Path, kit: Row, facts: Row, args: argparse.Namespace) -> None:
        self.into, self.kit, self.facts = into, kit, facts
        self.out, self.until, self.rehearse = args.out, args.until, args.rehearse
        self.places = Places.of(into, kit["script"])
        self.results = into / "results"
        (self.results / "logs").mkdir(parents=True, exist_ok=True)
        self.rows: dict[str, Row] = {}
        for file in sorted(self.results.glob(RECORDS)):
            self.rows |= json.loads(file.read_text()).get("steps", {})
        self.keep()  # what earlier calls recorded comes back even if this one records nothing

    def start_compile(self) -> None:
        """Start the compile of Transformer Engine; again, if an earlier one was killed."""
        if not self.rehearse and te.state(self.into).status in ("absent", "killed"):
            te.start(self.into, self._environment())
            print("transformer_engine_torch is being compiled in the background", flush=True)

    def take(self, step: Step) -> None:
        """Run a step and record how it ended; or leave it for another call."""
        reason = self._why_skip(step)
        if reason:
            self._record(step, {"status": "skipped", "seconds": 0.0, "reason": reason})
            return
        limit_s = self._limit_s(step)
        if time.time() + limit_s > self.until:
            print(f"{step.name}: left for another call: it may take {limit_s} s", flush=True)
            return
        if step.needs_te and not self.rehearse and te.state(self.into).status == "running":
            print(f"{step.name}: left for another call: the compile goes on", flush=True)
            return
        beside = te.state(self.into).status == "running"
        print(f"{step.name}: runs, for at most {limit_s} s", flush=True)
        self._record(step, {**self._run(step), "beside_the_compile": beside})

    def _limit_s(self, step: Step) -> int:
        """The limits are those of a GPU machine; a rehearsal says nothing of times."""
        return step.limit_s * (REHEARSAL_PATIENCE if self.rehearse else 1)

    def _why_skip(self, step: Step) -> str:
        if step.needs_te:
            if self.rehearse:
                without = "a rehearsal has no Transformer Engine"
                return "" if step.rehearsal else without
            self._wait_for_compile(step)
            build = te.state(self.into)
            if build.status in ("failed", "killed", "absent"):
                return f"Transformer Engine is not there: {build.reason or build.status}"
        if importlib.util.find_spec(step.module) is None:
            return f"this checkout has no {step.module}"
        return ""

    def _wait_for_compile(self, step: Step) -> None:
        """Wait as long as the step can still be started in this call."""
        waiting = False
        while te.state(self.into).status == "running" and time.time() + step.limit_s < self.until:
            if not waiting:
                print(f"{step.name}: waits for the compile", flush=True)
            waiting = True
            time.sleep(1)

    def _run(self, step: Step) -> Row:
        given = step.rehearsal if self.rehearse and step.rehearsal else step.arguments
        command = [sys.executable, "-m", step.module, *self.places.words(given)]
        command += ["--out", str(self.results)]
        command += ["--device", "cpu", "--rehearse"] if self.rehearse else []
        log = self.results / "logs" / f"{step.name}.log"
        started = time.monotonic()
        with log.open("w") as file:
            process = subprocess.Popen(
                command,
                env=self._environment(step),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            try:
                status: int | None = process.wait(self._limit_s(step))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                # also after a step that ended: nothing of it may run beside the next one
                end_processes(self.into)
                process.wait()
        row = outcome(status, log.read_text(errors="replace"), self._limit_s(step))
        return {**row, "seconds": round(time.monotonic() - started, 1)}

    def _environment(self, step: Step | None = None) -> dict[str, str]:
        """Of a step's process; of the compile, which is no step, without one."""
        paths = [*self.places.paths]
        if step is not None and step.needs_te and not self.rehearse:
            paths.append(self.into / "te")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        env["PYTHONUNBUFFERED"] = "1"  # a step that is ended has its output in the log
        env |= {"OMP_NUM_THREADS": "1"} if self.rehearse else {}
        env |= {MARK: str(self.into), RECORD_SUFFIX: step.suffix} if step is not None else {}
        return env

    def _record(self, step: Step, row: Row) -> None:
        self.rows[step.name] = row
        reason = f": {row['reason']}" if row["reason"] else ""
        print(f"{step.name}: {row['status']}, {row['seconds']} s{reason}", flush=True)
        self.keep()

    def keep(self) -> None:
        """Write the rows, and copy all results so far to --out."""
        build = te.state(self.into)
        if not self.rehearse and build.status in ("passed", "failed", "killed"):
            self.rows["te-compile"] = dict(vars(build))
            shutil.copyfile(self.into / "te-build" / "log", self.results / "logs/te-compile.log")
        file = results_file(self.results, self.facts)
        known = json.loads(file.read_text()) if file.exists() else {}
        kit = {**self.facts, **self.kit, "rehearsal": self.rehearse}
        write_results(file, "steps", {**known, "kit": kit, "steps": self.rows})
        if self.out is not None:
            shutil.copytree(self.results, self.out, dirs_exist_ok=True)

    def summary(self, steps: Sequence[Step]) -> int:
        """Print a line for each step; return the exit status."""
        left = [step.name for step in steps if step.name not in self.rows]
        for line in table(self.rows):
            print(line)
        print(f"results: {self.out or self.results}")
        if left:
            print(f"left for another call: {', '.join(left)}")
            return LEFT
        return int(any(row["status"] in ("failed", "timed out") for row in self.rows.values()))


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
        return row | {
            "status": "skipped",
            "reason": last.removeprefix("skipped: "),
            "skipped_cases": {},
        }
    if status:
        return row | {"status": "failed", "reason": f"exit status {status}: {last}"}
    return row


def table(rows: dict[str, Row]) -> list[str]:
    """The summary: a line for each step, and one for each case that it skipped."""
    lines = [f"{'step':16} {'status':10} {'seconds':>8}  reason"]
    for name, row in rows.items():
        lines.append(
            f"{name:16} {row['status']:10} {row['seconds']:>8.1f}  {row['reason']}".rstrip()
        )
        for case, reason in row.get("skipped_cases", {}).items():
            lines.append(f"  {case}: skipped: {reason}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
