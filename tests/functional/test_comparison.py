"""A tiny comparison, through the real loop: under router noise R3 lowers k3, and live does not.

The policy is hardly trained and a run has one collection, so that nothing can be said of rewards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_r3.cpu.ranks import free_port
from proof.comparison.report import VALUES, half, pairs

REPO = Path(__file__).parents[2]
COLLECTIONS = 1


@pytest.fixture(scope="module")
def command(patched_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """`proof.comparison.run` of live and R3 under noise, with a policy that is made fast."""
    out = tmp_path_factory.mktemp("comparison")
    words = [sys.executable, "-m", "proof.comparison.run", "--megatron", str(patched_tree)]
    words += ["--out", str(out), "--jobs", "2", "--only", "noise/live,noise/r3", "--seeds", "1"]
    words += ["--collections", str(COLLECTIONS), "--first-port", str(free_port())]
    words += ["--learn", "--wrong-labels 0 --train-iters 10 --lr 3e-3 --lr-warmup-iters 2"]
    return [*words, "--sharpen", "--wrong-labels 0 --train-iters 1 --lr 1e-9"]


@pytest.fixture(scope="module")
def done(command: list[str]) -> subprocess.CompletedProcess[str]:
    return run(command)


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=REPO, env=env, capture_output=True, text=True, check=False, timeout=900
    )


def out_of(command: list[str]) -> Path:
    return Path(command[command.index("--out") + 1])


def test_replay_lowers_k3_under_noise(
    done: subprocess.CompletedProcess[str], command: list[str]
) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((out_of(command) / "comparison.json").read_text())
    ((live, r3),) = pairs(record, "noise")
    for one in (live, r3):
        assert all(len(one[name]) == COLLECTIONS for name in VALUES)
    # The same policy, prompts and seed: the first collection is the same in both arms, so that the
    # replayed routes are all that differs.
    assert live["reward"][0] == r3["reward"][0]
    assert live["k3"][0] > 2 * r3["k3"][0]
    assert half(live["router_mismatch"]) > 0.2


def test_the_arms_did_what_they_say(
    done: subprocess.CompletedProcess[str], command: list[str]
) -> None:
    for arm, replayed in (("live", 0.0), ("r3", 1.0)):
        (folder,) = out_of(command).glob(f"*/noise/{arm}-0")
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
        assert [step["iteration"] for step in steps] == [*range(1, 2 * COLLECTIONS + 1)]
        assert {step["update/routes from rollout"] for step in steps} == {replayed}
        assert {step["update/policy lag max"] for step in steps} == {0}
        assert steps[0]["update/ratio"] == pytest.approx(1, abs=1e-5)  # the old policy's own pass
        assert "router_noise=0.7" in (folder / "logs" / "sampler.log").read_text()


def test_what_is_complete_is_not_run_again(
    done: subprocess.CompletedProcess[str], command: list[str]
) -> None:
    before = (out_of(command) / "comparison.json").read_text()
    again = run(command)
    assert again.returncode == 0, again.stderr
    assert "2 runs, 2 of them complete" in again.stdout
    assert (
        json.loads(before)["runs"]
        == json.loads((out_of(command) / "comparison.json").read_text())["runs"]
    )
