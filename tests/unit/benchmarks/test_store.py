"""The rounds of the store benchmark: what they compare, when they end, what a row claims."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proof.benchmarks import store
from proof.benchmarks.interval import LOOKS
from proof.benchmarks.store import BASE, Seconds, Way, run_rounds, summarise


def rows_of(slow: float, most: int = 32) -> tuple[list[dict[str, Any]], list[str]]:
    """Rounds of made-up times: the rows, and the ways in the order in which they ran.

    Args:
        slow: how many times as long as `BASE` the way "other" takes for the same bytes.
        most: rounds at most.
    """
    draw, ran = random.Random(0), []

    def timed(run: Callable[[], Any]) -> Seconds:
        run()
        taken = {BASE: 1.0, "other": 2 * slow}[ran[-1]] * draw.lognormvariate(0.0, 0.05)
        return taken, 0.5 * taken

    # "other" moves twice the bytes: at the same speed it takes twice as long
    ways = [
        Way(BASE, lambda: ran.append(BASE), 1e9, 512),
        Way("other", lambda: ran.append("other"), 2e9, None, compared=True),
    ]
    return summarise(ways, run_rounds(ways, most, timed)), ran


def test_equal_ways_cannot_be_told_apart() -> None:
    """The control of the next test."""
    (base, other), ran = rows_of(1.0)
    assert len(ran) == 2 * 33
    assert base["wall_of_base"] is None
    assert not other["wall_of_base"]["tells"]
    assert not other["cpu_of_base"]["tells"]
    assert store._line(other).count("cannot tell (0.") == 2


def test_a_slow_way_is_told_and_ends_the_rounds() -> None:
    (base, other), ran = rows_of(1.5)
    assert len(ran) == 2 * (1 + LOOKS[0])
    assert other["wall_of_base"]["median"] == pytest.approx(1.5, rel=0.1)
    assert other["wall_of_base"]["tells"]
    assert base["gb_per_s"] == pytest.approx(1.0, rel=0.1)
    assert base["gb_per_cpu_s"] == pytest.approx(2.0, rel=0.1)
    assert "cannot tell" not in store._line(other)


def test_ways_take_turns() -> None:
    _, ran = rows_of(1.0, most=3)
    assert {ran[i] for i in range(0, 8, 2)} == {BASE, "other"}


def test_it_runs_and_claims_nothing_of_one_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert store.main(["--out", "out.json", "--tokens", "1", "--rounds", "1"]) == 0
    found = json.loads(Path("out.json").read_text())
    assert found["load"] >= 0
    compared = [row for row in found["rows"] if row["wall_of_base"]]
    assert len(compared) == 5
    assert all(row["cpu_of_base"]["tells"] is False for row in compared)
    assert capsys.readouterr().out.count("cannot tell (1 value)") == 2 * 5
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_slice_that_reads_too_much_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ways = {way.what: way for way in store._ours(1, tmp_path)}
    way = ways["slice of a PP4 x CP2 rank"]
    way.before()
    way.run()
    with pytest.raises(AssertionError, match="bytes read for a slice"):
        way.run()  # the same shards again: twice the bytes
