"""A session: how each step ends is recorded, what was recorded is kept, a later call goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from proof.gpu_kit import session
from proof.gpu_kit.session import LEFT, MARK, main, outcome
from proof.gpu_kit.steps import Step

ROOT = Path(__file__).parents[3]
# a step: its first word says what it does, and each of its cases is recorded as a real step does it
STEP = """
import subprocess, sys, time
from pathlib import Path
from proof.benchmarks.machine import write_results
what, out = sys.argv[1], Path(sys.argv[sys.argv.index("--out") + 1])
with Path(out.parent, "ran").open("a") as ran:
    print(what, file=ran)
if what == "passes":
    write_results(out, what, {"gpu": "NVIDIA X", "rows": [1]})
    print("skipped: a case: no such device: none at all")
elif what == "fails":
    sys.exit("it is wrong")
elif what == "skips":
    print("skipped: there is nothing to do")
    sys.exit(77)
elif what == "skips-in-silence":
    print("bye")
    sys.exit(77)
elif what == "hangs":
    write_results(out, what, {"gpu": "NVIDIA X", "rows": [1]})
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(out.parent, "child").write_text(str(child.pid))
    time.sleep(600)
"""


def step(what: str, limit_s: int = 60, **more: Any) -> Step:
    return Step(what, "fake_step", what, limit_s, **more)


@pytest.fixture
def into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A kit that was unpacked, whose only program is STEP, on a machine that has a GPU."""
    checkout = tmp_path / "into" / "kit" / "checkout"
    checkout.mkdir(parents=True)
    (checkout / "fake_step.py").write_text(STEP)
    (checkout / "proof").symlink_to(ROOT / "proof")
    (checkout.parent / "kit.json").write_text('{"script": "tree/pretrain_gpt.py", "commit": "c0"}')
    (tmp_path / "into" / "te").mkdir()
    (tmp_path / "into" / "te-build").mkdir()
    compiled(tmp_path / "into", "passed", "")
    monkeypatch.syspath_prepend(str(checkout))
    monkeypatch.setattr(session, "machine_facts", lambda device: {"gpu": "NVIDIA X"})
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield tmp_path / "into"
    for number, handler in before.items():
        signal.signal(number, handler)


def compiled(into: Path, status: str, reason: str) -> None:
    state = {"status": status, "seconds": 1.0, "reason": reason}
    (into / "te-build" / "state.json").write_text(json.dumps(state))
    (into / "te-build" / "log").write_text("compiling\n")


def results(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("nvidia-x-*.json")
    return dict(json.loads(file.read_text()))


def rows(into: Path) -> dict[str, Any]:
    return dict(results(into / "results")["steps"])


def ran(into: Path) -> list[str]:
    return (into / "ran").read_text().split() if (into / "ran").exists() else []


def until(condition: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended, and that nobody has waited for, does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_how_each_step_ended_is_recorded(into: Path, tmp_path: Path) -> None:
    steps = [step(what) for what in ("passes", "fails", "skips", "skips-in-silence")]
    missing = Step("missing", "proof.gpu_kit.no_such_module", "", 60)
    out = tmp_path / "out"
    assert main(["--into", str(into), "--out", str(out)], [*steps, missing]) == 1
    found = rows(into)
    assert {name: row["status"] for name, row in found.items()} == {
        "te-compile": "passed",
        "passes": "passed",
        "fails": "failed",
        "skips": "skipped",
        "skips-in-silence": "failed",
        "missing": "skipped",
    }
    assert found["passes"]["skipped_cases"] == {"a case": "no such device: none at all"}
    assert found["fails"]["reason"] == "exit status 1: it is wrong"
    assert found["skips"]["reason"] == "there is nothing to do"
    assert found["missing"]["reason"] == "this checkout has no proof.gpu_kit.no_such_module"
    kept = results(out)
    assert kept == results(into / "results")
    assert kept["passes"]["rows"] == [1]
    assert kept["kit"]["commit"] == "c0"
    assert (out / "logs" / "fails.log").read_text() == "it is wrong\n"


def test_a_step_ends_at_its_limit_with_all_that_it_started(into: Path) -> None:
    assert main(["--into", str(into)], [step("hangs", 8), step("passes")]) == 1
    found = results(into / "results")
    assert found["steps"]["hangs"]["status"] == "timed out"
    assert found["steps"]["hangs"]["reason"] == "it was ended after 8 s"
    assert found["hangs"]["rows"] == [1]  # what it had recorded by then
    assert found["steps"]["passes"]["status"] == "passed"
    until(lambda: not alive(int((into / "child").read_text())))


def test_a_later_call_runs_what_has_no_result(into: Path, tmp_path: Path) -> None:
    soon = str(time.time() + 120)
    argv = ["--into", str(into), "--until", soon]
    assert main(argv, [step("passes"), step("skips", 600)]) == LEFT
    assert list(rows(into)) == ["te-compile", "passes"]
    out = tmp_path / "out"
    argv = ["--into", str(into), "--out", str(out)]
    assert main(argv, [step("passes"), step("skips", 600)]) == 0
    assert ran(into) == ["passes", "skips"]
    assert results(out)["steps"]["passes"]["status"] == "passed"


def test_a_session_that_is_killed_keeps_its_results(into: Path) -> None:
    program = (
        "import sys; from proof.gpu_kit import session; from proof.gpu_kit.steps import Step\n"
        "session.machine_facts = lambda device: {'gpu': 'NVIDIA X'}\n"
        "steps = [Step(w, 'fake_step', w, 60) for w in ('passes', 'hangs')]\n"
        "sys.exit(session.main(['--into', sys.argv[1]], steps))"
    )
    path = os.pathsep.join([str(ROOT), str(into / "kit" / "checkout")])
    killed = subprocess.Popen(
        [sys.executable, "-c", program, str(into)], env={**os.environ, "PYTHONPATH": path}
    )
    until((into / "child").exists)
    killed.kill()
    killed.wait()
    child = int((into / "child").read_text())
    assert alive(child)  # nobody ended what the step had started
    assert list(rows(into)) == ["te-compile", "passes"]
    assert results(into / "results")["hangs"]["rows"] == [1]
    assert main(["--into", str(into)], [step("passes"), step("fails")]) == 1
    assert ran(into) == ["passes", "hangs", "fails"]
    until(lambda: not alive(child))


def test_processes_of_another_kit_are_left_alone(into: Path) -> None:
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: f"{into}-another"})
    assert main(["--into", str(into)], [step("passes")]) == 0
    assert other.poll() is None
    other.kill()
    other.wait()


def test_without_transformer_engine_its_steps_are_skipped(into: Path) -> None:
    compiled(into, "failed", "it does not compile")
    steps = [step("passes"), step("skips", needs_te=True)]
    assert main(["--into", str(into)], steps) == 1  # the compile failed
    assert ran(into) == ["passes"]
    found = rows(into)
    assert found["skips"]["status"] == "skipped"
    assert found["skips"]["reason"] == "Transformer Engine is not there: it does not compile"
    assert found["te-compile"]["status"] == "failed"
    assert (into / "results" / "logs" / "te-compile.log").read_text() == "compiling\n"


def test_only_steps_that_need_transformer_engine_see_it(into: Path) -> None:
    look = Step("look", "look", "", 60)
    look_te = Step("look-te", "look", "", 60, needs_te=True)
    text = "import sys; sys.exit(f'te: {any(p.endswith(\"into/te\") for p in sys.path)}')"
    (into / "kit" / "checkout" / "look.py").write_text(text)
    main(["--into", str(into)], [look, look_te])
    assert rows(into)["look"]["reason"].endswith("te: False")
    assert rows(into)["look-te"]["reason"].endswith("te: True")


def test_a_rehearsal_runs_no_step_that_needs_transformer_engine(into: Path) -> None:
    steps = [step("passes", needs_te=True), step("skips", needs_te=True, rehearsal="skips")]
    assert main(["--into", str(into), "--rehearse"], steps) == 0
    assert rows(into)["passes"]["reason"] == "a rehearsal has no Transformer Engine"
    assert ran(into) == ["skips"]


def test_a_suffix_names_the_record(into: Path) -> None:
    text = (
        "import sys; from pathlib import Path\n"
        "from proof.benchmarks.machine import write_results\n"
        "out = Path(sys.argv[sys.argv.index('--out') + 1])\n"
        "write_results(out, 'kernel', {'gpu': 'NVIDIA X'})\n"
    )
    (into / "kit" / "checkout" / "tune.py").write_text(text)
    steps = [Step("a", "tune", "", 60), Step("b", "tune", "", 60, suffix="te")]
    assert main(["--into", str(into)], steps) == 0
    assert {"kernel", "kernel te"} <= results(into / "results").keys()


def test_without_a_device_nothing_is_recorded(
    into: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["--into", str(into)], [step("passes")]) == 2
    error = capsys.readouterr().err
    assert "finds no CUDA device here; --rehearse runs every step tiny on the CPU" in error
    assert error.count("\n") == 1
    assert not (into / "results").exists()


def test_outcomes() -> None:
    assert outcome(0, "", 5)["status"] == "passed"
    assert outcome(0, "skipped: a step that passes has no reason", 5)["skipped_cases"] == {}
    assert outcome(1, "", 5)["reason"] == "exit status 1: no output"
    assert outcome(-9, "x", 5)["reason"] == "exit status -9: x"
    row = outcome(77, "skipped: a: b\nskipped: why: since", 5)
    assert (row["status"], row["reason"], row["skipped_cases"]) == ("skipped", "why: since", {})
    row = outcome(1, "skipped: a: b\nerror: c", 5)
    assert (row["status"], row["skipped_cases"]) == ("failed", {"a": "b"})
