"""The table of steps, the packages, the count of a test report, what a rehearsal may skip."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from proof.gpu.run import complaints
from proof.gpu.steps import EXPECTED_SKIPS, STEPS, Places
from proof.gpu.tests_gpu import counted

ROOT = Path(__file__).parents[3]
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


def test_a_place_with_a_space_is_one_word(tmp_path: Path) -> None:
    tree, demo = tmp_path / "a tree", tmp_path / "demo"
    words = Places.of(tree, demo).words("--tree {tree} --script {script}")
    ours = ROOT / "megatron_r3" / "train" / "pretrain_gpt.py"
    assert words == ["--tree", str(tree), "--script", str(ours)]
    tree.mkdir()
    (tree / "pretrain_gpt.py").touch()
    assert Places.of(tree, demo).script == tree / "pretrain_gpt.py"


def test_each_package_is_pinned() -> None:
    for file in (ROOT / "proof" / "gpu").glob("packages-*.txt"):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert lines
        assert all(re.fullmatch(r"[\w.-]+==[\d.]+ --hash=sha256:[0-9a-f]{64}", x) for x in lines)


# -- what a rehearsal skips


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
    where = "EXPECTED_SKIPS of proof/gpu/steps.py"
    rows = rehearsed()
    rows["gate"]["status"] = "skipped"
    assert complaints(rows) == [f"gate was skipped, and is not in {where}"]
    rows = rehearsed()
    rows["te-gate"]["status"] = "passed"
    assert complaints(rows) == [f"te-gate is in {where}, and was not skipped"]
    rows = rehearsed()
    rows["layers"]["skipped_cases"]["fused"] = "why"
    assert complaints(rows) == [f"layers/fused was skipped, and is not in {where}"]


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
