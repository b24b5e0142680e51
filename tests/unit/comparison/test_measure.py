"""What is read of run directories, which are made up here as the loop leaves them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from online_run import make_run

from proof.comparison.measure import METRICS, VALUES, half, measured, window_ends, windows


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(file: Path, lines: list[dict]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_collection_has_the_values_of_its_first_update(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=20)
    found = measured(run, collections=10, steps=2)
    assert found.keys() == {*VALUES}
    steps = lines_of(run / "metrics.jsonl")
    for name, metric in METRICS.items():
        assert found[name] == [float(f"{line[metric]:.5g}") for line in steps[::2]]
        assert found[name] != [float(f"{line[metric]:.5g}") for line in steps[1::2]]
    collected = [e for e in lines_of(run / "events/collector.jsonl") if e["event"] == "collected"]
    assert found["reward"] == [float(f"{event['reward']:.5g}") for event in collected]


def test_a_run_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=20)
    with pytest.raises(ValueError, match="reward of collection 10 is missing"):
        measured(run, collections=11, steps=2)
    steps = lines_of(run / "metrics.jsonl")
    write(run / "metrics.jsonl", steps[:-2])
    with pytest.raises(ValueError, match="k3 kl in step 19 is missing"):
        measured(run, collections=10, steps=2)
    write(run / "metrics.jsonl", [{**line, "token mismatch": float("nan")} for line in steps])
    with pytest.raises(ValueError, match="token mismatch in step 1 is missing or not finite"):
        measured(run, collections=10, steps=2)


def test_of_a_step_that_came_twice_the_later_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=4)
    steps = lines_of(run / "metrics.jsonl")
    again = {**steps[2], "update/entropy": 0.125}
    write(run / "metrics.jsonl", [*steps, again])
    assert measured(run, collections=2, steps=2)["entropy"][1] == 0.125


def test_windows() -> None:
    assert window_ends(60) == [(1, 10), (11, 20), (21, 30), (31, 40), (41, 50), (51, 60)]
    assert window_ends(4) == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert [last - first + 1 for first, last in window_ends(8)] == [1, 2, 1, 1, 2, 1]
    values = [*range(60)]
    assert windows(values) == [4.5, 14.5, 24.5, 34.5, 44.5, 54.5]
    assert half(values) == 44.5
    assert half([1, 2, 6]) == 4
