"""Runs several `megatron-r3 rl run` at a time, each with its log; none outlives this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

from megatron_r3.loop.processes import signals_raise, start, stop
from proof.comparison.arms import Run
from proof.comparison.policy import ROOT

_POLL_S = 0.2
# One thread for each process: two runs share the cores, and threads that spin while they wait for
# a busy core make a step many times slower.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@dataclass(frozen=True)
class Job:
    """A run that is to be made.

    Attributes:
        run: which one.
        config: its file; the run's directory lies beside it, with the same name without .toml.
        digest: of all that the result depends on.
    """

    run: Run
    config: Path
    digest: str

    @property
    def directory(self) -> Path:
        """Of the run."""
        return self.config.with_suffix("")

    @property
    def log(self) -> Path:
        """What `rl run` itself says; the logs of its parts are in the directory of the run."""
        return self.config.with_suffix(".log")


def run_all(jobs: Sequence[Job], most: int, finish: Callable[[Job, float], None]) -> dict[str, str]:
    """Run the jobs in their order.

    Args:
        most: how many at a time.
        finish: called when a run has ended well, with the seconds that it took. A ValueError of it
            makes the run one that failed.

    Returns:
        Why runs failed, by their keys. One that fails does not stop the others.

    Raises:
        KeyboardInterrupt: this process was told to stop; the runs that went on are stopped.
    """
    waiting, failed = [*jobs], {}
    running: dict[Job, tuple[Popen[bytes], float]] = {}
    try:
        with signals_raise():
            while waiting or running:
                while waiting and len(running) < most:
                    job = waiting.pop(0)
                    running[job] = (_start(job), time.monotonic())
                time.sleep(_POLL_S)
                for job, (process, began) in [*running.items()]:
                    if process.poll() is None:
                        continue
                    del running[job]
                    seconds = time.monotonic() - began
                    if reason := _ended(job, process, seconds, finish):
                        failed[job.run.key] = reason
                    done = len(jobs) - len(waiting) - len(running)
                    outcome = "FAILED" if reason else "done"
                    line = f"{done}/{len(jobs)} {job.run.key}: {outcome} in {seconds:.0f} s"
                    print(line, flush=True)
    finally:
        for process, _ in running.values():
            stop(process)
    return failed


def _start(job: Job) -> Popen[bytes]:
    job.log.unlink(missing_ok=True)  # of an earlier try
    command = [sys.executable, "-m", "megatron_r3.cli", "rl", "run", str(job.config)]
    return start(command, _ENVIRONMENT, job.log)


def _ended(
    job: Job, process: Popen[bytes], seconds: float, finish: Callable[[Job, float], None]
) -> str:
    """Why a run failed; empty if it did not."""
    if process.returncode:
        lines = job.log.read_text(errors="replace").splitlines()
        said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        last = said[-1] if said else "it said nothing"
        return f"exit status {process.returncode}, log {job.log}: {last}"
    try:
        finish(job, seconds)
    except ValueError as error:
        return f"log {job.log}: {error}"
    return ""
