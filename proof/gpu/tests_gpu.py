"""The step tests-gpu: runs tests/gpu with pytest on a patched tree, and records what passed.

    python -m proof.gpu.tests_gpu --tree TREE --out RESULTS [--device cpu --rehearse]

The exit status is 1 if a test failed, or if none was run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from proof.benchmarks.machine import device_of, machine_of, write_results

ROOT = Path(__file__).parents[2]


def main(argv: list[str] | None = None) -> int:
    """Run pytest; record the counts, the failures, and what was skipped in which file."""
    parser = argparse.ArgumentParser(prog="tests_gpu", description=str(__doc__).splitlines()[0])
    parser.add_argument("--tree", type=Path, required=True, help="a patched tree of Megatron-LM")
    parser.add_argument("--out", type=Path, required=True, help="a file or a folder to write to")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--rehearse", action="store_true", help="the same tests; CUDA's are skipped"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temp:
        report = Path(temp, "report.xml")
        command = [sys.executable, "-m", "pytest", str(ROOT / "tests" / "gpu"), "-q"]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}"]
        command += ["--patched-tree", str(args.tree.resolve())]
        subprocess.run(command, cwd=ROOT, check=False)
        found = counted(report) if report.exists() else {"passed": 0, "failures": ["no report"]}
    record = {**machine_of(), **device_of(args.device), "rehearsal": args.rehearse, **found}
    write_results(args.out, "tests-gpu", record)
    for file, skips in found.get("skips", {}).items():
        for reason in skips:
            print(f"skipped: {file}: {reason}")
    print(f"{found['passed']} passed, {len(found['failures'])} failed")
    return 1 if found["failures"] or not found["passed"] else 0


def counted(report: Path) -> dict[str, Any]:
    """What a JUnit report of pytest says.

    Returns:
        `passed`, `failed`, `skipped`: numbers of tests. `failures`: the names of those that failed.
        `skips`: for each file the reasons, each with the number of its tests.
    """
    failures: list[str] = []
    skips: dict[str, Counter[str]] = defaultdict(Counter)
    passed = 0
    for case in ET.parse(report).iter("testcase"):
        file = f"{case.get('classname', '').rpartition('.')[2]}.py"
        name = f"{file}::{case.get('name')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failures.append(name)
        elif skipped is not None:
            skips[file][skipped.get("message") or "no reason"] += 1
        else:
            passed += 1
    # a collection that fails has an empty class name; its name is the module's
    counts = {file: dict(reasons) for file, reasons in skips.items()}
    skipped_tests = sum(sum(reasons.values()) for reasons in counts.values())
    return {
        "passed": passed,
        "failed": len(failures),
        "skipped": skipped_tests,
        "failures": failures,
        "skips": counts,
    }


if __name__ == "__main__":
    sys.exit(main())
