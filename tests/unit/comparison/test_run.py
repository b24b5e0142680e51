"""Which runs are made, which are complete, and how one that fails is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from online_run import make_run

from proof.comparison import jobs
from proof.comparison.arms import ARMS, REGIMES, Run
from proof.comparison.jobs import Job, run_all
from proof.comparison.run import RESULT, _finish, collected, is_complete, main

HELD = {"policies", "checkpoints", "rollouts"}


def job_in(folder: Path, arm: str = "live", digest: str = "d1", seed: int = 0) -> Job:
    place = folder / "runs" / "noise"
    place.mkdir(parents=True, exist_ok=True)
    return Job(Run(REGIMES["noise"], ARMS[arm], seed), place / f"{arm}-{seed}.toml", digest)


def finished(folder: Path, arm: str = "live", seed: int = 0) -> Job:
    job = job_in(folder, arm, seed=seed)
    assert not is_complete(job)
    make_run(job.directory, steps=8, seed=seed)
    (job.directory / "checkpoints").mkdir()
    _finish(job, 12.4, collections=4, made_of="m")
    return job


def test_a_finished_run_is_complete_and_has_left_its_weights_behind(tmp_path: Path) -> None:
    job = finished(tmp_path)
    assert is_complete(job)
    assert not HELD & {path.name for path in job.directory.iterdir()}
    result = json.loads((job.directory / RESULT).read_text())
    assert (result["digest"], result["seconds"], len(result["k3"])) == ("d1", 12, 4)


def test_a_run_of_another_config_is_made_anew(tmp_path: Path) -> None:
    job = finished(tmp_path)
    other = job_in(tmp_path, digest="d2")
    assert not is_complete(other)
    assert {path.name for path in job.directory.iterdir()} == {"digest"}


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    assert not is_complete(job)
    (job.directory / "metrics.jsonl").write_text("{}")
    assert not is_complete(job)
    assert (job.directory / "metrics.jsonl").exists()
    assert not is_complete(job_in(tmp_path, digest="d2"))
    assert not (job.directory / "metrics.jsonl").exists()


def test_a_run_that_is_not_whole_has_no_result(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    make_run(job.directory, steps=8)
    with pytest.raises(ValueError, match="reward of collection 4 is missing"):
        _finish(job, 1.0, collections=5, made_of="m")
    assert not (job.directory / RESULT).exists()
    assert HELD & {path.name for path in job.directory.iterdir()}


def test_all_complete_runs_are_collected(tmp_path: Path) -> None:
    finished(tmp_path, "r3")
    finished(tmp_path, "live", seed=1)
    (tmp_path / "runs" / "noise" / "live-2").mkdir()
    record = collected(tmp_path, 4, "m")
    assert [(run["arm"], run["seed"]) for run in record["runs"]] == [("r3", 0), ("live", 1)]
    assert "digest" not in record["runs"][0]
    assert collected(tmp_path, 5, "m")["runs"] == []
    assert collected(tmp_path, 4, "of another code")["runs"] == []


def test_a_run_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real `rl run`s, of configs that are refused; and of one whose result is refused."""
    made = [job_in(tmp_path, "live"), job_in(tmp_path, "r3")]
    made[0].config.write_text("[run]\ncolour = 1")
    failed = run_all(made, 1, lambda job, seconds: None)
    assert failed.keys() == {"noise/live-0", "noise/r3-0"}
    assert f"exit status 1, log {made[0].log}: " in failed["noise/live-0"]
    assert "[run] colour: no such field" in failed["noise/live-0"]
    assert "not readable" in failed["noise/r3-0"]
    assert "2/2 noise/r3-0: FAILED" in capsys.readouterr().out


def test_a_run_that_ends_well_and_is_not_whole_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_start", lambda job: jobs.start(["true"], {}))

    def refuse(job: Job, seconds: float) -> None:
        raise ValueError("not whole")

    made = job_in(tmp_path)
    assert run_all([made], 2, refuse) == {"noise/live-0": f"log {made.log}: not whole"}
    assert run_all([made], 2, lambda job, seconds: None) == {}


def test_a_regime_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--megatron", str(tmp_path), "--out", str(tmp_path / "out"), "--only", "nose"]
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith("error: --only nose: there is no 'nose'")
    assert not (tmp_path / "out").exists()
