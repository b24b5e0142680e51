"""Rehearses a kit: a cold unpack in a fresh folder, in two calls, then every step tiny on the CPU.

    python -m proof.gpu_kit.rehearse build/gpu-kit-rehearsal

What is run is the kit's own script, with this Python. The results are copied to the kit's folder,
as `results`. The exit status is 1 if a step failed, or if what was skipped is not exactly what
proof/gpu_kit/steps.py expects.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proof.gpu_kit.session import RECORDS
from proof.gpu_kit.steps import EXPECTED_SKIPS, STEPS
from proof.gpu_kit.unpack import MISSING


def main(argv: list[str] | None = None) -> int:
    """Bring all parts but one, then the last one; compare what was skipped."""
    parser = argparse.ArgumentParser(prog="rehearse", description=str(__doc__).splitlines()[0])
    parser.add_argument("kit", type=Path, help="the folder that make gpu-kit built")
    kit = parser.parse_args(argv).kit.resolve()
    results = kit / "results"
    shutil.rmtree(results, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="gpu-kit-rehearsal-") as temp:
        *parts, last = sorted(kit.glob("part-*"))
        if parts:
            status = _call(Path(temp), kit, parts, results)
            if status != MISSING:
                print(f"error: without {last.name} the exit status is {status}", file=sys.stderr)
                return 1
        status = _call(Path(temp), kit, [last], results)
    files = sorted(results.glob(RECORDS))
    if not files:
        print(f"error: no results, exit status {status}", file=sys.stderr)
        return 1
    rows: dict[str, Any] = {}
    for file in files:
        rows |= json.loads(file.read_text())["steps"]
    wrong = complaints(rows)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    print(f"{len(skips_of(rows))} steps and cases skipped; logs: {results / 'logs'}")
    return 1 if wrong or status else 0


def _call(temp: Path, kit: Path, parts: list[Path], results: Path) -> int:
    """One call of the kit's script, with some parts beside it, as a machine would see it."""
    beside = temp / "brought"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    for file in (kit / "run", *parts):
        shutil.copy(file, beside)
    # nothing of this checkout may be found but what the kit brings
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(beside / "run"), "--into", str(temp / "into"), "--rehearse"]
    command += ["--out", str(results), "--minutes", "60"]
    return subprocess.run(command, env=env, cwd=temp, check=False).returncode


def skips_of(rows: Mapping[str, Any]) -> set[str]:
    """The steps that were skipped, and STEP/CASE for each case that was."""
    steps = {name for name, row in rows.items() if row["status"] == "skipped"}
    return steps | {
        f"{name}/{case}" for name, row in rows.items() for case in row.get("skipped_cases", ())
    }


def complaints(rows: Mapping[str, Any]) -> list[str]:
    """What is not as expected: steps that failed or have no result, skips too many or too few."""
    wrong = [f"{step.name} has no result" for step in STEPS if step.name not in rows]
    wrong += [
        f"{name}: {row['status']}: {row['reason']}"
        for name, row in rows.items()
        if row["status"] not in ("passed", "skipped")
    ]
    skipped = skips_of(rows)
    wrong += [f"{name} was skipped" for name in sorted(skipped - EXPECTED_SKIPS)]
    wrong += [
        f"{name} is in EXPECTED_SKIPS of proof/gpu_kit/steps.py, and was not skipped"
        for name in sorted(EXPECTED_SKIPS - skipped)
    ]
    return wrong


if __name__ == "__main__":
    sys.exit(main())
