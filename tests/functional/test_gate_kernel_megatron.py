"""Replaying Megatron's own live choice with the gate kernel gives Megatron's gate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gate_megatron import CASES

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows(megatron_tree: Path) -> list[dict[str, Any]]:
    path = os.pathsep.join([str(megatron_tree), str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("gate_megatron.py"))]
    run = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_the_gate_is_megatrons(rows: list[dict[str, Any]]) -> None:
    right = [row for row in rows if row["broken"] == "nothing"]
    assert len({row["name"] for row in right}) >= len(CASES) - 1  # up to 0.17: no sqrtsoftplus
    for row in right:
        assert row["map"] == 0, row
        assert row["probs"] <= 1, row
        assert row["gradient"] <= 1, row


@pytest.mark.parametrize("broken", ["id", "rows", "scale"])
def test_the_comparison_can_fail(rows: list[dict[str, Any]], broken: str) -> None:
    wrong = [row for row in rows if row["broken"] == broken]
    assert wrong
    for row in wrong:
        assert (row["map"] == 0) == (broken == "scale"), row
        assert row["probs"] > 1, row
