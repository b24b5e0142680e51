"""Runs the comparison: every arm in every regime, with several seeds, as runs of the loop.

    python -m proof.comparison.run --megatron TREE [--out DIR] [--jobs N] [--only REGIME[/ARM],...]
        [--seeds N] [--collections N]

Each run is a `megatron-r3 rl run` in a directory of its own. A run that is complete is not
repeated, so the command goes on where it was stopped. DIR/comparison.json has what all complete
runs showed; `python -m proof.comparison.report` makes the document of it.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from demo.process import Failed
from megatron_r3.data.whole_file import write_whole
from proof.benchmarks.machine import device_of, machine_at_start
from proof.comparison.arms import COLLECTIONS, SEEDS, runs_of
from proof.comparison.config import MINI_STEPS, write_config
from proof.comparison.jobs import Job, run_all
from proof.comparison.measure import measured
from proof.comparison.policy import LEARN, ROOT, SHARPEN, StartingPolicy
from proof.comparison.table import summary

FIRST_PORT = 31800  # each run has a port of its own above it
RESULT = "result.json"


def main(argv: list[str] | None = None) -> int:
    """Run what is not complete yet; 1 where a run fails, 130 where it is stopped."""
    args = _arguments().parse_args(argv)
    out = args.out.resolve()
    try:
        wanted = runs_of(args.only, args.seeds)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    machine = machine_at_start()
    start = StartingPolicy(out / "start", args.megatron.resolve())
    try:
        start.make(args.learn.split(), args.sharpen.split())
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    # seeds come one after the other, so that more seeds leave the ports of a run as they are
    ports = {run.key: args.first_port + i for i, run in enumerate(runs_of("", args.seeds))}
    made_of, jobs = source_digest(start), []
    for run in wanted:
        folder = out / "runs" / run.regime.key
        port = ports[run.key]
        config = write_config(folder, run, start, sys.executable, port, args.collections)
        job = Job(run, config, _digest(config, made_of))
        if not is_complete(job):
            jobs.append(job)
    print(f"{len(wanted)} runs, {len(wanted) - len(jobs)} of them complete", flush=True)
    began = time.monotonic()
    try:
        failed = run_all(
            jobs, args.jobs, lambda job, took: _finish(job, took, args.collections, made_of)
        )
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    record = {**machine, **collected(out, args.collections, made_of)}
    write_whole(out / "comparison.json", as_json(record))
    print(f"{summary(record)}\n\n{out / 'comparison.json'}; {time.monotonic() - began:.0f} s")
    for key, reason in failed.items():
        print(f"error: {key}: {reason}", file=sys.stderr)
    return 1 if failed else 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m proof.comparison.run", description=str(__doc__).splitlines()[0]
    )
    add = parser.add_argument
    add("--megatron", type=Path, required=True, help="a patched tree")
    add("--out", type=Path, default=Path("build/comparison"))
    add("--jobs", type=_count, default=2, help="runs at a time; each takes about one core")
    only = "only the runs of these regimes, or of an arm in a regime"
    add("--only", default="", metavar="REGIME[/ARM],...", help=only)
    add("--seeds", type=_count, default=SEEDS)
    add("--collections", type=_count, default=COLLECTIONS, help="of each run")
    add("--first-port", type=_count, default=FIRST_PORT, help="each run has a port of its own")
    add("--learn", default=" ".join(LEARN), help="arguments of the first training")
    add("--sharpen", default=" ".join(SHARPEN), help="and of the second one; empty: none")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number above 0")
    return int(text)


# -- one run


def is_complete(job: Job) -> bool:
    """Whether a run has a result of this config and this starting policy.

    What another config has left is removed. A run that was stopped stays, and goes on.
    """
    result = job.directory / RESULT
    if result.exists():
        if json.loads(result.read_text())["digest"] == job.digest:
            _remove_what_takes_room(job)  # a kill may have come before that
            return True
        shutil.rmtree(job.directory)
    kept = job.directory / "digest"
    if job.directory.exists() and (not kept.exists() or kept.read_text() != job.digest):
        shutil.rmtree(job.directory)
    job.directory.mkdir(parents=True, exist_ok=True)
    kept.write_text(job.digest)
    return False


def _digest(config: Path, made_of: str) -> str:
    return hashlib.sha256(config.read_bytes() + made_of.encode()).hexdigest()


def source_digest(start: StartingPolicy) -> str:
    """A digest of what all runs depend on: our code and patches, and the starting policy.

    Results of other code are not put beside those of this one.
    """
    files = [*ROOT.glob("megatron_r3/**/*.py"), *ROOT.glob("proof/comparison/*.py")]
    files += [*ROOT.glob("patches/**/*.patch"), start.out / "done"]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _finish(job: Job, seconds: float, collections: int, made_of: str) -> None:
    """Keep what a run showed, and remove what takes room: weights, checkpoints and rollouts.

    Raises:
        ValueError: the run is not whole.
    """
    found = measured(job.directory, collections, MINI_STEPS)
    result = {"digest": job.digest, "made_of": made_of, "seconds": round(seconds), **found}
    write_whole(job.directory / RESULT, as_json(result))
    _remove_what_takes_room(job)


def _remove_what_takes_room(job: Job) -> None:
    for name in ("policies", "checkpoints", "rollouts"):
        shutil.rmtree(job.directory / name, ignore_errors=True)


# -- all of them


def collected(out: Path, collections: int, made_of: str) -> dict[str, Any]:
    """What all complete runs showed, also those of earlier calls with as many collections.

    Args:
        made_of: `source_digest`; a run of another code or starting policy is left out.
    """
    runs = []
    for run in runs_of("", 100):
        file = out / "runs" / run.key / RESULT
        if not file.exists():
            continue
        result = json.loads(file.read_text())
        del result["digest"]
        if result.pop("made_of") == made_of and len(result["reward"]) == collections:
            of = {"regime": run.regime.key, "arm": run.arm.key, "seed": run.seed}
            runs.append({**of, **result})
    return {
        "date": str(datetime.date.today()),
        "torch": device_of("cpu")["torch"],
        "collections": collections,
        "runs": runs,
    }


def as_json(record: dict[str, Any]) -> str:
    """The text of a record, in which each of `runs` is a line of its own."""
    rest = {name: value for name, value in record.items() if name != "runs"}
    text = json.dumps(rest, indent=1)
    if "runs" not in record:
        return text + "\n"
    lines = ",\n".join(f"  {json.dumps(run)}" for run in record["runs"])
    return f'{text[:-2]},\n "runs": [\n{lines}\n ]\n}}\n'


if __name__ == "__main__":
    sys.exit(main())
