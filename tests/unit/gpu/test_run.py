"""`make gpu` with made-up steps: what is recorded, skipped, ended, left; and what is packed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from proof.gpu import run
from proof.gpu.run import main, outcome
from proof.gpu.steps import STEPS, Step

ROOT = Path(__file__).parents[3]
FAKE = """
import os, subprocess, sys, time
from pathlib import Path
from proof.benchmarks.machine import write_results
what, out = sys.argv[1], Path(sys.argv[sys.argv.index("--out") + 1])
with (out / "ran").open("a") as ran:
    ran.write(f"{what}\\n")
if what == "sees":
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.exit([Path(p).name for p in paths[2:]] != sys.argv[2:sys.argv.index("--out")])
if what == "kills":
    os.kill(int(os.environ["CALLER"]), 9)
    time.sleep(600)
if what == "hangs":
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (out / "child").write_text(str(child.pid))
    write_results(out, "hangs", {"gpu": "NVIDIA X", "rows": [1]})
    time.sleep(600)
write_results(out, "kernel", {"gpu": "NVIDIA X"})
print({"fails": "it is wrong", "skips": "skipped: no such thing"}.get(what, "skipped: a: b"))
sys.exit({"fails": 1, "skips": 77}.get(what, 0))
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A patched tree and what the demo made, as far as they are looked at; a made-up machine."""
    config = tmp_path / "tree" / "megatron" / "core" / "transformer" / "transformer_config.py"
    config.parent.mkdir(parents=True)
    config.write_text("moe_router_replay")
    (tmp_path / "tree" / "fake_step.py").write_text(FAKE)
    for name in ("rollouts", "checkpoint"):
        (tmp_path / "demo" / name).mkdir(parents=True)
    told = {"gpu": "NVIDIA X", "no_te": "Transformer Engine is not installed"}
    monkeypatch.setattr(run, "facts_of", lambda *_: told)
    return tmp_path


def step(what: str, **fields: Any) -> Step:
    return Step(what, f"fake_step {what} {{record}}", 60, **fields)


def call(places: Path, steps: list[Step], *more: str) -> int:
    argv = ["--megatron", str(places / "tree"), "--demo", str(places / "demo")]
    return main([*argv, "--out", str(places / "out"), *more], steps)


def recorded(places: Path) -> dict[str, Any]:
    (file,) = (places / "out").glob("nvidia-x-*.json")
    return dict(json.loads(file.read_text()))


def ran(places: Path) -> list[str]:
    return (places / "out" / "ran").read_text().split()


def test_each_step_is_recorded_once(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [step("passes"), step("fails"), step("skips"), step("needs", needs_te=True)]
    steps.append(Step("second", "fake_step second {record}", 60, suffix="te"))
    assert call(places, steps) == 1
    found = recorded(places)
    assert {name: row["status"] for name, row in found["steps"].items()} == {
        "passes": "passed",
        "fails": "failed",
        "skips": "skipped",
        "needs": "skipped",
        "second": "passed",
    }
    assert found["steps"]["passes"]["skipped_cases"] == {"a": "b"}
    assert found["steps"]["fails"]["reason"] == "exit status 1: it is wrong"
    assert found["steps"]["needs"]["reason"] == "Transformer Engine is not installed"
    assert {"kernel", "kernel te"} <= found.keys()
    assert found["machine"]["commit"] == run.commit_of(ROOT)
    assert (places / "out" / "logs" / "fails.log").read_text() == "it is wrong\n"
    assert call(places, steps) == 1  # nothing is run again
    assert ran(places) == ["passes", "fails", "skips", "second"]
    assert "  a: skipped: b\n" in capsys.readouterr().out


def test_a_step_that_hangs_is_ended_with_what_it_started(places: Path) -> None:
    hangs = Step("hangs", "fake_step hangs {record}", 2)
    assert call(places, [hangs, step("passes")]) == 1
    found = recorded(places)
    assert found["steps"]["hangs"]["status"] == "timed out"
    assert found["steps"]["hangs"]["reason"] == "it was ended after 2 s"
    assert found["hangs"]["rows"] == [1]  # what it had recorded stays
    assert found["steps"]["passes"]["status"] == "passed"
    child = int((places / "out" / "child").read_text())
    end = time.monotonic() + 20
    while psutil.pid_exists(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not psutil.pid_exists(child)


def test_only_steps_that_need_transformer_engine_see_it(places, monkeypatch):
    monkeypatch.setattr(run, "facts_of", lambda *_: {"gpu": "NVIDIA X", "no_te": None})
    steps = [
        Step("without", "fake_step sees site {record}", 60),
        Step("with", "fake_step sees site site-te {record}", 60, needs_te=True),
        Step("control", "fake_step sees site site-te {record}", 60),
    ]
    assert call(places, steps, "--site", str(places / "site")) == 1
    statuses = {name: row["status"] for name, row in recorded(places)["steps"].items()}
    assert statuses == {"without": "passed", "with": "passed", "control": "failed"}


def test_a_call_that_is_killed_keeps_its_results(places: Path) -> None:
    """The next call goes on with the step that was under way."""
    code = "from pathlib import Path; from unit.gpu.test_run import *; "
    code += "os.environ['CALLER'] = str(os.getpid()); "
    code += "run.facts_of = lambda *_: {'gpu': 'NVIDIA X', 'no_te': None}; "
    code += f"call(Path({str(places)!r}), [step('passes'), step('kills'), step('fails')])"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=False)
    assert killed.returncode == -9
    assert {name: row["status"] for name, row in recorded(places)["steps"].items()} == {
        "passes": "passed"
    }
    assert call(places, [step("passes"), step("skips")]) == 0
    assert ran(places) == ["passes", "kills", "skips"]


def test_a_step_that_does_not_fit_is_left(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [Step("short", "fake_step short {record}", 5), step("long")]
    assert call(places, steps, "--minutes", "0.5") == run.LEFT
    assert "left for another call: long" in capsys.readouterr().out
    assert call(places, steps) == 0
    assert ran(places) == ["short", "long"]


def test_what_is_missing_is_said(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (places / "demo" / "rollouts").rmdir()
    assert call(places, []) == 2
    said = f"error: there is no {places / 'demo' / 'rollouts'}: run make demo first"
    assert said in capsys.readouterr().err
    (places / "tree" / "megatron/core/transformer/transformer_config.py").write_text("")
    assert call(places, []) == 2
    assert "is no patched Megatron-LM: make apply" in capsys.readouterr().err


def test_without_a_device_nothing_is_recorded(places, monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert call(places, [step("passes")]) == 2
    error = capsys.readouterr().err
    assert "finds no CUDA device here; --rehearse runs every step tiny on the CPU" in error
    assert error.count("\n") == 1
    assert not (places / "out").exists()


@pytest.mark.parametrize(
    ("status", "log", "ended", "reason", "cases"),
    [
        (0, "", "passed", "no output", {}),
        (0, "skipped: a step that passes has no reason", "passed", "skipped: a step that", {}),
        (1, "", "failed", "exit status 1: no output", {}),
        (-9, "x", "failed", "exit status -9: x", {}),
        (77, "skipped: a: b\nskipped: why: since", "skipped", "why: since", {}),
        (1, "skipped: a: b\nerror: c", "failed", "exit status 1: error: c", {"a": "b"}),
        (None, "", "timed out", "it was ended after 5 s", {}),
        (0, "SKIPPED [2] a.py:3: no c: d\n1 passed, 2 skipped", "passed", "1 passed", "a.py:3"),
        (0, "SKIPPED [2] a.py:3: no CUDA\n2 skipped in 1 s", "failed", "exit status 0", "a.py:3"),
    ],
)
def test_outcomes(status: int | None, log: str, ended: str, reason: str, cases: Any) -> None:
    row = outcome(status, log, 5)
    assert row["status"] == ended
    assert row["reason"].startswith(reason)
    assert row["skipped_cases"] == cases or [*row["skipped_cases"]] == [cases]


# -- the table of steps

CALL_S = 570  # of each of the three calls: ten minutes, less what the end of a call takes
UNPACK_S = 45


def calls_needed(limits: list[int]) -> int:
    """How many calls the steps take, in their order, if each takes as long as it may."""
    calls, left = 1, CALL_S - UNPACK_S
    for limit in limits:
        if limit > left:
            calls, left = calls + 1, CALL_S
        left -= limit
    return calls


def test_all_steps_fit_into_three_calls_those_without_transformer_engine_first() -> None:
    limits = [step.limit_s for step in STEPS]
    assert calls_needed(limits) == 3
    assert calls_needed([*limits, 300]) == 4
    assert len({step.name for step in STEPS}) == len(STEPS)
    assert [step.needs_te for step in STEPS] == sorted(step.needs_te for step in STEPS)
    assert all(importlib.util.find_spec(step.command.split()[0]) for step in STEPS)


def test_each_package_is_pinned() -> None:
    for file in (ROOT / "proof" / "gpu").glob("packages-*.txt"):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert lines
        assert all(re.fullmatch(r"[\w.-]+==[\d.]+ --hash=sha256:[0-9a-f]{64}", x) for x in lines)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a checkout is packed by git")
def test_packed_is_unpacked(places: Path) -> None:
    """Without packages, out of a checkout of what git has here."""
    checkout = places / "checkout"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
    (places / "demo" / "rollouts" / "shard").write_bytes(b"1" * 1000)
    command = [str(checkout / "proof" / "gpu" / "pack"), str(places / "packed")]
    command += [str(places / "tree"), str(places / "demo"), "--without-packages"]
    subprocess.run(command, check=True, capture_output=True)
    machine = places / "machine"
    machine.mkdir()
    unpack = f"cat {places}/packed/part-* | tar x && ./unpack"
    subprocess.run(["bash", "-c", unpack], cwd=machine, check=True)
    assert (machine / "demo" / "rollouts" / "shard").read_bytes() == b"1" * 1000
    assert (machine / "site").is_dir()
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
    )
    assert (machine / "checkout" / "COMMIT").read_text() == commit.stdout
    assert os.access(machine / "checkout" / "proof" / "gpu" / "pack", os.X_OK)
    # a control: what is not committed is not packed in silence
    (checkout / "README.md").write_text("changed")
    refused = subprocess.run(command, check=False, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "error: commit first, since the results name a commit:  M README.md" in refused.stderr
