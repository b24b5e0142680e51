"""docker/launch/slurm.sh, run by bash: which part of a run goes to which node of which job.

The programs of Slurm are stand-ins here: `scontrol` says which nodes there are, and `srun` notes
what it is given and runs the step once for each node.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from launch_files import SLURM

PROGRAMS = {
    "scontrol": 'tr , "\\n" <<<"$3"',
    "srun": """
while [ "$1" != bash ]; do [ "$1" != --nodelist ] || nodes=$2; shift; done
number=0
for node in ${nodes//,/ }; do
  SLURM_PROCID=$number NODE=$node "$@" || exit
  number=$((number + 1))
done
""",
    # with --print the trainer's command: it notes what torchrun would read
    "megatron-r3": """
case "$*" in *--print) echo "train $PET_NNODES"; exit ;; esac
[ "$2" = "${FAILS:-}" ] && exit 7
echo "${NODE:-batch}: $*" >>"$NOTES"
""",
    "train": 'echo "$NODE: train $PET_NODE_RANK of $PET_NNODES at $PET_MASTER_ADDR" >>"$NOTES"',
}


def run(
    folder: Path, nodes: str, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The script in a job of these nodes, and what its parts noted, sorted."""
    programs, notes = folder / "bin", folder / "notes"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (programs / name).chmod(0o755)
    config = folder / "a run.toml"
    config.write_text("")
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    job = {"SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": "3", "NOTES": str(notes)}
    env = {**plain, **job, "PATH": f"{programs}:{os.environ['PATH']}", "RESTARTS": "0", **variables}
    done = subprocess.run(
        ["bash", str(SLURM), str(config)], env=env, capture_output=True, text=True, check=False
    )
    lines = notes.read_text().splitlines() if notes.exists() else []
    return done, sorted(line.replace(str(config), "CONFIG") for line in lines)


@pytest.mark.parametrize(
    ("nodes", "variables", "noted"),
    [
        (
            "a,b,c",
            {},
            [
                "a: rl collector CONFIG",
                "a: rl sampler CONFIG",
                "b: train 0 of 2 at b",
                "c: train 1 of 2 at b",
            ],
        ),
        ("a", {}, ["a: rl collector CONFIG", "a: rl sampler CONFIG", "a: train 0 of 1 at a"]),
        (
            "a,b,c",
            {"PARTS": "trainer"},
            ["a: train 0 of 3 at a", "b: train 1 of 3 at a", "c: train 2 of 3 at a"],
        ),
        ("a", {"PARTS": "sampler collector"}, ["a: rl collector CONFIG", "a: rl sampler CONFIG"]),
        ("a", {"PARTS": "sampler"}, ["a: rl sampler CONFIG --host 0.0.0.0"]),
        ("b", {"PARTS": "collector", "SAMPLER_HOST": "a"}, ["b: rl collector CONFIG --host a"]),
        ("a,b", {"PARTS": "collector trainer"}, ["a: rl collector CONFIG", "b: train 0 of 1 at b"]),
    ],
)
def test_each_part_is_on_its_nodes(tmp_path, nodes, variables, noted):
    done, lines = run(tmp_path, nodes, **variables)
    assert done.returncode == 0, done.stderr
    assert lines == sorted(["batch: rl check CONFIG", *noted])


@pytest.mark.parametrize("part", ["sampler", "collector"])
def test_a_job_ends_with_the_status_of_the_part_that_failed(tmp_path: Path, part: str) -> None:
    done, _ = run(tmp_path, "a", PARTS="sampler collector", FAILS=part)
    assert done.returncode == 7
    assert f"{part}: ended with status 7" in done.stderr


def test_a_part_that_there_is_not_is_refused(tmp_path: Path) -> None:
    done, lines = run(tmp_path, "a", PARTS="trainers")
    assert (done.returncode, lines) == (2, [])
    assert done.stderr == "error: PARTS: there is no part trainers\n"
