"""The training script for trees without pretrain_gpt.py trains on rollouts and on nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from training import Policy

from demo.model import arguments

ROOT = Path(__file__).parents[2]


def run(tree: Path, argv: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", "1"]
    return subprocess.run(
        [*command, "-m", "megatron_r3.cpu", str(ROOT / "megatron_r3/train/pretrain_gpt.py"), *argv],
        env={**os.environ, "PYTHONPATH": f"{tree}:{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def errors_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode != 0
    return [line for line in done.stderr.splitlines() if line.startswith("error: ")]


def test_it_trains_on_rollouts(patched_tree: Path, policy: Policy) -> None:
    done = run(patched_tree, policy.arguments())
    assert done.returncode == 0, done.stderr
    assert "replaying them" in done.stdout
    assert "routes dispatched as recorded: 1.0" in done.stdout


def test_without_rollouts_one_line_says_so(patched_tree: Path) -> None:
    batch = ["--micro-batch-size", "4", "--global-batch-size", "4", "--train-iters", "1"]
    done = run(patched_tree, arguments(batch, ["--lr", "1e-3"]))
    expected = "this script has no data of its own: give --rollouts DIR, a rollout store"
    assert errors_of(done) == [f"error: {expected}"]


def test_validation_is_refused_in_one_line(patched_tree: Path, policy: Policy) -> None:
    done = run(patched_tree, policy.arguments("--eval-iters", "1"))
    expected = "this script has no data for validation: give --eval-iters 0"
    assert errors_of(done) == [f"error: {expected}"]


def test_help_is_printed(patched_tree: Path, megatron_tree: Path) -> None:
    """Upstream's own help ends with a ValueError, for a bare % ("10%") in a docstring."""
    done = run(patched_tree, ["--help"])
    assert done.returncode == 0, done.stderr
    assert "--moe-router-replay" in done.stdout
    assert "(e.g. 1.10 = 10%)" in done.stdout
    unpatched = run(megatron_tree, ["--help"])
    assert "ValueError: unsupported format character" in unpatched.stderr
