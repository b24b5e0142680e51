"""The table of steps, the packages, the compile, the count of a test report, what CI may skip."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from proof.gpu_kit import te
from proof.gpu_kit.packages import SECTIONS, read_table
from proof.gpu_kit.rehearse import complaints
from proof.gpu_kit.steps import EXPECTED_SKIPS, STEPS, Places
from proof.gpu_kit.tests_gpu import counted

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


def test_all_steps_fit_into_three_calls() -> None:
    limits = [step.limit_s for step in STEPS]
    assert calls_needed(limits) == 3
    assert calls_needed([*limits, 300]) == 4


def test_the_steps_without_transformer_engine_come_first() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    assert [step.needs_te for step in STEPS] == sorted(step.needs_te for step in STEPS)


def test_the_programs_of_the_steps_are_here() -> None:
    assert all(importlib.util.find_spec(step.module) for step in STEPS)


def test_a_place_with_a_space_is_one_word() -> None:
    words = Places.of(Path("/a kit"), "tree/x.py").words("--tree {tree} --script {script}")
    assert words == ["--tree", "/a kit/kit/tree", "--script", "/a kit/kit/tree/x.py"]


def test_each_package_is_pinned() -> None:
    table = read_table()
    names = [name for section in SECTIONS for name in table[section]]
    assert len(names) == len(set(names)) >= 10
    for section in SECTIONS:
        for name, sha256 in table[section].items():
            assert name.count("==") == 1
            assert len(sha256) == 64


# -- what CI expects


def rehearsed() -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for step in STEPS:
        skipped = step.name in EXPECTED_SKIPS
        cases = [n.partition("/")[2] for n in EXPECTED_SKIPS if n.startswith(f"{step.name}/")]
        rows[step.name] = {
            "status": "skipped" if skipped else "passed",
            "reason": "",
            "skipped_cases": dict.fromkeys(cases, "why"),
        }
    return rows


def test_a_rehearsal_may_skip_exactly_what_is_listed() -> None:
    assert complaints(rehearsed()) == []
    rows = rehearsed()
    rows["gate"]["status"] = "skipped"
    assert complaints(rows) == ["gate was skipped"]
    rows = rehearsed()
    rows["te-gate"]["status"] = "passed"
    (line,) = complaints(rows)
    assert line == "te-gate is in EXPECTED_SKIPS of proof/gpu_kit/steps.py, and was not skipped"
    rows = rehearsed()
    rows["layers"]["skipped_cases"]["fused"] = "why"
    assert complaints(rows) == ["layers/fused was skipped"]
    rows = rehearsed()
    rows["gate"] |= {"status": "timed out", "reason": "slow"}
    assert complaints(rows) == ["gate: timed out: slow"]
    rows = rehearsed()
    del rows["training"]
    assert complaints(rows) == ["training has no result"]


# -- a test report

REPORT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_a" name="test_one"/>
<testcase classname="tests.gpu.test_a" name="test_two[3]"><failure message="m"/></testcase>
<testcase classname="tests.gpu.test_b" name="test_three"><error message="m">t</error></testcase>
<testcase classname="tests.gpu.test_b" name="test_four"><skipped message="no CUDA"/></testcase>
<testcase classname="tests.gpu.test_b" name="test_five"><skipped message="no CUDA"/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_counted(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert counted(tmp_path / "report.xml") == {
        "passed": 1,
        "failed": 2,
        "skipped": 2,
        "failures": ["test_a.py::test_two[3]", "test_b.py::test_three"],
        "skips": {"test_b.py": {"no CUDA": 2}},
    }


# -- the compile of Transformer Engine


def test_the_states_of_a_compile(tmp_path: Path) -> None:
    assert te.state(tmp_path).status == "absent"
    (tmp_path / "te-build").mkdir()
    with (tmp_path / "te-build" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert te.state(tmp_path).status == "running"
    assert te.state(tmp_path).status == "killed"


def test_a_compile_that_cannot_be_says_so(tmp_path: Path) -> None:
    te.start(tmp_path, {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])})
    end = time.monotonic() + 60
    while te.state(tmp_path).status == "running":
        assert time.monotonic() < end
        time.sleep(0.05)
    build = te.state(tmp_path)
    assert build.status == "failed", (tmp_path / "te-build" / "log").read_text()
    assert build.reason.startswith("the kit has no sources of transformer_engine_torch")


def write_wheel(folder: Path, name: str, file: str) -> None:
    """A wheel with one empty file in it."""
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{name}-1.0.dist-info"
    texts = {
        file: "",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, text in texts.items():
            wheel.writestr(path, text)


def test_packages_that_share_a_folder_keep_all_their_files(tmp_path: Path) -> None:
    write_wheel(tmp_path / "kit" / "packages" / "te", "engine", "engine/__init__.py")
    write_wheel(tmp_path / "wheels", "engine_torch", "engine/wheel_lib/engine_torch.so")
    for _ in range(2):  # also where an earlier try left something
        assert te.installed(tmp_path, tmp_path / "wheels")
        assert (tmp_path / "te" / "engine" / "__init__.py").exists()
        assert (tmp_path / "te" / "engine" / "wheel_lib" / "engine_torch.so").exists()


def test_the_compiler_finds_headers_and_leaves_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setenv("CPATH", "/mine")
    monkeypatch.delenv("MAX_JOBS", raising=False)
    env = te.compiler_environment()
    assert env["MAX_JOBS"] == "12"
    assert env["CPATH"].split(os.pathsep)[0] == "/mine"
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert te.compiler_environment()["MAX_JOBS"] == "1"
    monkeypatch.setenv("MAX_JOBS", "3")
    assert te.compiler_environment()["MAX_JOBS"] == "3"
