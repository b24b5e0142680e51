"""The benchmark of publishing: what a row says, and which memory is too much."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from proof.benchmarks.publish import LAYOUTS, SLACK, _line, main, memory_holds, summarise

CI = Path(__file__).parents[3] / ".ci" / "run"
LAYER = 100_000_000


def test_a_row_is_the_slowest_and_the_largest_rank() -> None:
    one = [(0.1, 110, 50, 400, 100), (0.3, 130, 50, 400, 100), (0.2, 120, 50, 400, 100)]
    other = [(0.2, 100, 60, 400, 100), (0.1, 100, 60, 400, 100), (0.4, 100, 60, 400, 100)]
    row = summarise([one, other])
    assert row == {"wall_ms": 300, "memory": 120, "part": 60, "model": 400, "layer": 100}
    line = _line({"hidden": 8, "layers": 4, "layout": "EP2", **row})
    assert line.split()[-3:] == ["1.20", "300", "ms"]


def test_two_layers_at_a_time_are_too_many() -> None:
    assert memory_holds({"layer": LAYER, "memory": LAYER + SLACK})
    assert not memory_holds({"layer": LAYER, "memory": 2 * LAYER})


@pytest.mark.parametrize("argv", [["--rounds", "0"], ["--only", "EP3"]])
def test_what_measures_nothing_is_refused(argv: list[str], tmp_path: Any) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(["--out", str(tmp_path / "out"), *argv])
    assert refusal.value.code == 2
    assert not (tmp_path / "out").exists()


def test_ci_measures_a_layout_of_two_ranks() -> None:
    (only,) = re.findall(r"^step make bench-publish .*\bONLY=(\S+)", CI.read_text(), re.MULTILINE)
    assert [name for name in LAYOUTS if only in name] == ["EP2"]
