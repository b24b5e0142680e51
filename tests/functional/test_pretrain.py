"""The training script for trees without pretrain_gpt.py trains on rollouts and on nothing else."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys

import pytest
from training import Policy

from demo.model import arguments
from megatron_r3.train import pretrain_gpt
from proof.fidelity.rig.rank_process import RankError
from proof.fidelity.rig.worker import TreeWorker


def run(rank: int, argv: list[str]) -> str:
    """Run the script as a command; what it printed."""
    sys.argv, printed = [pretrain_gpt.__file__, *argv], io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    return printed.getvalue()


def error_of(worker: TreeWorker, argv: list[str]) -> str:
    with pytest.raises(RankError) as failure:
        worker.run(run, 1, argv, timeout_s=120)
    lines = str(failure.value).splitlines()
    (error,) = (line for line in lines if line.startswith("error: "))
    return error


def test_it_trains_on_rollouts(patched: TreeWorker, policy: Policy) -> None:
    (printed,) = patched.run(run, 1, policy.arguments(), timeout_s=120)
    assert "replaying them" in printed
    assert "routes dispatched as recorded: 1.0" in printed


def test_without_rollouts_one_line_says_so(patched: TreeWorker) -> None:
    batch = ["--micro-batch-size", "4", "--global-batch-size", "4", "--train-iters", "1"]
    expected = "this script has no data of its own: give --rollouts DIR, a rollout store"
    assert error_of(patched, arguments(batch, ["--lr", "1e-3"])) == f"error: {expected}"


def test_validation_is_refused_in_one_line(patched: TreeWorker, policy: Policy) -> None:
    expected = "this script has no data for validation: give --eval-iters 0"
    assert error_of(patched, policy.arguments("--eval-iters", "1")) == f"error: {expected}"


def test_help_is_printed(patched: TreeWorker, unpatched: TreeWorker) -> None:
    """Upstream's own help ends with a ValueError, for a bare % ("10%") in a docstring."""
    (printed,) = patched.run(run, 1, ["--help"])
    assert "--moe-router-replay" in printed
    assert "(e.g. 1.10 = 10%)" in printed
    with pytest.raises(RankError, match="ValueError: unsupported format character"):
        unpatched.run(run, 1, ["--help"])
