"""Runs the comparison: each regime with its arms and several seeds, as runs of the loop.

    python -m proof.comparison.run --megatron TREE [--out DIR] [--jobs N] [--only REGIME[/ARM],...]
        [--collections N]

Each run is a `megatron-r3 rl run` in a directory of its own. A run that is complete is not
repeated, so the same command continues what was stopped. DIR/comparison.json has what all complete
runs showed; `python -m proof.comparison.report` makes docs/comparison.md from that file.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen
from typing import Any

import torch

from demo.process import Failed
from megatron_r3.cpu import CPU_ARGS
from megatron_r3.data.whole_file import write_whole
from megatron_r3.loop.config import ConfigError, read_config
from megatron_r3.loop.processes import signals_raise, start, stop
from proof.benchmarks.machine import machine_at_start
from proof.comparison import report
from proof.comparison.arms import ARMS, COLLECTIONS, REGIMES, Run, runs_of
from proof.comparison.start import MODEL, ROOT, make
from proof.comparison.task import MAX_ANSWER, problem

FIRST_PORT = 31800  # of the first run; each later run has the next port
RESULT = "result.json"
PROMPTS, SAMPLES, MINI_STEPS = 8, 8, 2
CHECKPOINT_EVERY = 20  # collections
FIRST_PROMPT, EACH_SEED = 50_000_000, 1_000_000  # problems that no training of `start.py` has
# what all arms share; --seed is that of the run
UPDATE = f"""
--micro-batch-size 32 --global-batch-size 32 --rollouts-mini-steps {MINI_STEPS} --lr 4e-4
--lr-decay-style constant --calculate-per-token-loss --moe-router-load-balancing-type none
--rollouts-old-policy trainer --moe-router-replay-log-mismatch-interval 1
""".split()
# Each process has one thread. Two runs share the cores, and threads that spin while they wait for a
# busy core make a step many times slower.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def main(argv: list[str] | None = None) -> int:
    """Do the runs that are not complete yet; return the exit status, 130 if a signal comes."""
    args = _arguments().parse_args(argv)
    try:
        wanted = runs_of(args.only)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    machine, began = machine_at_start(), time.monotonic()
    out, megatron = args.out.resolve(), args.megatron.resolve()
    # results of other code, or of runs of another length, are in another folder
    folder = out / digest_of(f"{args.collections}")
    try:
        with signals_raise():
            make(folder / "start", megatron)
            for port, run in enumerate(runs_of(), start=FIRST_PORT):
                write_config(folder, run, megatron, port, args.collections)
            waiting = [run for run in wanted if not (folder / run.key / RESULT).exists()]
            print(f"{len(wanted)} runs, {len(wanted) - len(waiting)} of them complete", flush=True)
            failed = run_all(folder, waiting, args.jobs, args.collections)
    except (Failed, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return 130
    record = {
        **machine,
        "date": str(datetime.date.today()),
        "torch": torch.__version__,
        "collections": args.collections,
        "runs": collected(folder),
    }
    write_whole(out / "comparison.json", report.as_json(record))
    print(f"{report.tables(record)}\n\n{out / 'comparison.json'}; {time.monotonic() - began:.0f} s")
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
    only = "only the runs of these regimes, or of these arms in a regime"
    add("--only", default="", metavar="REGIME[/ARM],...", help=only)
    add("--collections", type=_count, default=COLLECTIONS, help="of each run")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number above 0")
    return int(text)


def digest_of(options: str) -> str:
    """A digest of what all runs depend on: this project's code and patches, and these options."""
    files = [*ROOT.glob("megatron_r3/**/*.py"), *ROOT.glob("proof/comparison/*.py")]
    digest = hashlib.sha256(options.encode())
    for file in sorted([*files, *ROOT.glob("demo/*.py"), *ROOT.glob("patches/**/*.patch")]):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def write_config(folder: Path, run: Run, megatron: Path, port: int, collections: int) -> Path:
    """Write the config of a run and its prompts: `noise/r3-0.toml`, beside the run's directory.

    Args:
        folder: the folder of all runs, with the starting policy in `start`.
        port: the sampler's port, which no other run has.

    Raises:
        megatron_r3.loop.config.ConfigError: the loop refuses the config.
    """
    regime, policy, file = REGIMES[run.regime], folder / "start", folder / f"{run.key}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    # All arms of a seed have the same prompts, so that only the arm differs. With a lag, policy 0
    # samples lag + 1 collections, and `rl run` asks that these have different prompts.
    first = FIRST_PROMPT + run.seed * EACH_SEED
    prompts = file.with_name(f"prompts-{run.seed}.jsonl")
    asked = range(first, first + max(collections, regime.lag + 1) * PROMPTS)
    lines = [json.dumps({"prompt": problem(n)[0], "group": n - first}) for n in asked]
    prompts.write_text("\n".join(lines) + "\n")
    spec = f"proof.comparison.degrade:{regime.degrade}"
    degrade = {"degrade": spec} if regime.degrade else {}
    groups = ([*CPU_ARGS, *MODEL, *UPDATE, "--seed", str(run.seed + 1)], [ARMS[run.arm].arguments])
    tables: dict[str, dict[str, Any]] = {
        "run": {
            "directory": file.stem,
            "collections": collections,
            "lag": regime.lag,
            "seed": run.seed,
            "wait": 600.0,
            "restarts": 0,  # if the sampler or the trainer dies, the run fails
        },
        "policy": {
            "model": str(policy / run.dtype),
            "checkpoint": str(policy / "checkpoint"),
            "keep": regime.lag + 1 + CHECKPOINT_EVERY,
        },
        "sampler": {"port": port, "max_tokens": MAX_ANSWER, **degrade},
        "prompts": {
            "file": prompts.name,
            "per_collection": PROMPTS,
            "samples": SAMPLES,
            "reward": "proof.comparison.task:reward",
        },
        "trainer": {
            "megatron": str(megatron),
            "launch": [sys.executable],  # one process, without torchrun
            "script": f"-m megatron_r3.cpu {ROOT}/megatron_r3/train/pretrain_gpt.py",
            "steps": MINI_STEPS,
            "checkpoint_every": CHECKPOINT_EVERY,
            "arguments": [shlex.join(groups[0]), *groups[1]],
        },
        "trainer.environment": {"OMP_NUM_THREADS": "1"},
    }
    # JSON's texts, numbers and lists are TOML's too
    lines = [
        f"[{table}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in of.items())
        for table, of in tables.items()
    ]
    file.write_text("\n".join(lines))
    read_config(file)
    return file


def run_all(folder: Path, runs: Sequence[Run], most: int, collections: int) -> dict[str, str]:
    """Start the runs in order, `most` at a time; a run that fails does not stop the others.

    Returns:
        For each run that failed, by its key, the reason.
    """
    waiting, failed = [*runs], {}
    running: dict[Run, tuple[Popen[bytes], float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < most:
                run = waiting.pop(0)
                log = folder / f"{run.key}.log"  # sampler and trainer log in the run's directory
                log.unlink(missing_ok=True)  # of an earlier try
                command = [sys.executable, "-m", "megatron_r3.cli", "rl", "run"]
                process = start([*command, str(folder / f"{run.key}.toml")], _ENVIRONMENT, log)
                running[run] = (process, time.monotonic())
            time.sleep(0.2)
            for run, (process, began) in [*running.items()]:
                if (status := process.poll()) is None:
                    continue
                del running[run]
                seconds = time.monotonic() - began
                if reason := finish(folder, run, status, seconds, collections):
                    failed[run.key] = reason
                done = f"{len(runs) - len(waiting) - len(running)}/{len(runs)} {run.key}"
                outcome = "FAILED" if reason else "done"
                print(f"{done}: {outcome} in {seconds:.0f} s", flush=True)
    finally:
        for process, _ in running.values():
            stop(process)
    return failed


def finish(folder: Path, run: Run, status: int, seconds: float, collections: int) -> str:
    """Keep what a run showed, and remove its weights, checkpoints and rollouts.

    Returns:
        Why the run failed; empty if it did not.
    """
    log, directory = folder / f"{run.key}.log", folder / run.key
    if status:
        lines = log.read_text(errors="replace").splitlines()
        said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (
            f"exit status {status}, log {log}: {said[-1] if said else 'the log has no error line'}"
        )
    try:
        values = report.measured(directory, collections, MINI_STEPS)
    except ValueError as error:
        return f"log {log}: {error}"
    result = {**run._asdict(), "seconds": round(seconds), **values}
    write_whole(directory / RESULT, json.dumps(result))
    for name in ("policies", "checkpoints", "rollouts"):
        shutil.rmtree(directory / name, ignore_errors=True)
    return ""


def collected(folder: Path) -> list[dict[str, Any]]:
    """The results of all complete runs, also those of earlier calls."""
    files = (folder / run.key / RESULT for run in runs_of())
    return [json.loads(file.read_text()) for file in files if file.exists()]


if __name__ == "__main__":
    sys.exit(main())
