"""The benchmark of the old-policy pass: what a row claims, and which counts it must have."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from proof.benchmarks.dispatch_ranks import Rounds
from proof.benchmarks.update import CASES, _line, counts_hold, main, summarise
from proof.benchmarks.update_ranks import PASSES, R2, SAMPLER, TRAINER, WAYS
from proof.benchmarks.waits import WAITS

CI = Path(__file__).parents[3] / ".ci" / "run"


def rows_of(times: dict[str, float], most: int = 8) -> list[dict[str, Any]]:
    """Rows of collections that took so long, with 4 layers and 4 micro-batches."""
    rounds, last = Rounds(most, WAYS), False
    while not last:
        taken = times[rounds.mode()]
        last = rounds.close_step([taken, 0.5 * taken])
    counts = {way: Counter({"experts": 32, WAITS: 16}) for way in (TRAINER, R2)}
    result = {
        "wall_s": rounds.wall_s,
        "cpu_s": rounds.cpu_s,
        "counts": {SAMPLER: Counter({"experts": 16}), **counts},
        "layers_and_microbatches": 16,
    }
    return [{"ep": 1, "mini_steps": 2, **row} for row in summarise(result)]


@pytest.mark.usefixtures("_one_rank")
def test_ratios_are_those_to_the_sampler_of_the_same_round() -> None:
    sampler, trainer, r2 = rows_of({SAMPLER: 3.0, TRAINER: 4.0, R2: 6.0})
    assert sampler["wall_of_sampler"] is sampler["cpu_of_sampler"] is None
    for name in ("wall_of_sampler", "cpu_of_sampler"):
        assert trainer[name]["median"] == pytest.approx(4 / 3)
        assert r2[name]["median"] == pytest.approx(2)
        assert trainer[name]["tells"]
    assert (trainer["collection_wall_ms"], trainer["collection_cpu_ms"]) == (4000, 2000)
    assert "1.333 (1.333 to 1.333)" in _line(trainer)
    equal = rows_of(dict.fromkeys(WAYS, 1.0))  # control
    assert "cannot tell" in _line(equal[1])


@pytest.mark.usefixtures("_one_rank")
def test_counts_that_are_not_of_one_pass_more_are_found() -> None:
    sampler, *others = rows_of(dict.fromkeys(WAYS, 1.0))
    for row in (sampler, *others):
        assert counts_hold(row)
        for wrong in ({PASSES: row[PASSES] + 1}, {PASSES: 1.5}, {WAITS: row[WAITS] + 0.5}):
            assert not counts_hold({**row, **wrong})
    assert not counts_hold({**others[0], PASSES: 1.0, WAITS: 0.0})  # there was no pass
    assert not counts_hold({**sampler, PASSES: 2.0, WAITS: 0.5})  # and here there was one


@pytest.mark.parametrize("argv", [["--rounds", "0"], ["--only", "EP3"]])
def test_what_measures_nothing_is_refused(argv: list[str], tmp_path: Any) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(["--out", str(tmp_path / "out"), *argv])
    assert refusal.value.code == 2
    assert not (tmp_path / "out").exists()


def test_ci_measures_both_sizes_of_a_collection() -> None:
    """Two ranks, with collections of 2 and of 4 mini-steps."""
    (only,) = re.findall(r"^step make bench-update .*\bONLY=(\S+)", CI.read_text(), re.MULTILINE)
    assert [case for name, case in CASES.items() if only in name] == [(2, 2), (2, 4)]
