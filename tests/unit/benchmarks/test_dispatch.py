"""The rounds of the dispatch benchmark: when they end, what they compare, what a row claims."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import pytest

from proof.benchmarks.dispatch import _counts_hold, _line, summarise
from proof.benchmarks.dispatch_ranks import MODES, Rounds
from proof.benchmarks.interval import LOOKS
from proof.benchmarks.waits import COPIES, GATHERS, PLANS, WAITS


def steps(most: int, slow: dict[str, float], spread: float) -> tuple[Rounds, list[str]]:
    """Run steps of made-up times until the last one: the rounds, and the way that each step went.

    Args:
        most: rounds at most.
        slow: how many times as long as live the other ways take.
        spread: of the times, as a share of them.
    """
    draw, rounds, went, last = random.Random(0), Rounds(most), [], False
    while not last:
        went.append(rounds.mode())
        taken = slow.get(went[-1], 1.0) * draw.lognormvariate(0.0, spread)
        last = rounds.close_step([taken, 0.5 * taken])
    return rounds, went


@pytest.mark.usefixtures("_one_rank")
def test_equal_ways_run_to_the_end_and_cannot_tell() -> None:
    """The control of the next test: only noise, and nothing is claimed."""
    rounds, went = steps(32, {}, 0.1)
    assert len(went) == rounds.done == rounds.most_steps == len(MODES) * 34
    for row in rows_of(rounds)[1:]:
        assert not row["wall_of_live"]["tells"]
        assert not row["cpu_of_live"]["tells"]
        assert "cannot tell (0." in _line(row)


@pytest.mark.usefixtures("_one_rank")
def test_ways_that_differ_end_early_and_tell() -> None:
    rounds, went = steps(32, {"replay": 1.3, "plan": 0.8}, 0.02)
    assert len(went) == len(MODES) * (1 + LOOKS[0] + 1)  # warmed up, timed, counted
    replay, plan = rows_of(rounds)[1:]
    for name in ("wall_of_live", "cpu_of_live"):
        assert replay[name]["median"] == pytest.approx(1.3, rel=0.05)
        assert plan[name]["median"] == pytest.approx(0.8, rel=0.05)
        assert replay[name]["tells"]
        assert plan[name]["tells"]
        assert plan[name]["count"] == plan["rounds"] == LOOKS[0]
    assert "cannot tell" not in _line(replay) + _line(plan)


@pytest.mark.usefixtures("_one_rank")
def test_one_way_that_cannot_be_told_keeps_all_going() -> None:
    _, went = steps(16, {"plan": 0.8}, 0.02)
    assert len(went) == len(MODES) * 18


@pytest.mark.usefixtures("_one_rank")
def test_one_round_claims_nothing() -> None:
    """What CI runs."""
    rounds, went = steps(1, {"replay": 1.3, "plan": 0.8}, 0.02)
    assert len(went) == len(MODES) * 3
    assert all("cannot tell (1 value)" in _line(row) for row in rows_of(rounds)[1:])


@pytest.mark.usefixtures("_one_rank")
def test_no_place_in_a_round_favours_a_way() -> None:
    _, went = steps(10, {}, 0.1)
    rounds = [tuple(went[i : i + 3]) for i in range(0, len(went), 3)]
    assert len(set(rounds[:6])) == 6
    for place in range(3):
        assert set(Counter(order[place] for order in rounds[:6]).values()) == {2}


def test_nothing_is_prepared_before_its_step_begins() -> None:
    rounds, prepared = Rounds(1), threading.Event()
    thread = threading.Thread(target=lambda: (rounds.wait_for(1), prepared.set()), daemon=True)
    rounds.open_step()
    thread.start()
    assert not prepared.wait(0.1)
    rounds.done = 1
    rounds.open_step()
    assert prepared.wait(10)


COUNTS = {"live": {WAITS: 8, COPIES: 8}, "replay": {WAITS: 8, COPIES: 8}, "plan": {}}


def rows_of(rounds: Rounds) -> list[dict[str, Any]]:
    result = {
        "wall_s": rounds.wall_s,
        "cpu_s": rounds.cpu_s,
        "counts": {mode: Counter(counts) for mode, counts in COUNTS.items()},
        "layer_passes": 8,
        "plan_collectives": 1.0,
        "planning_s": 0.001,
        "checking_s": 0.001,
        "tokens": 1000,
    }
    return [{"ep": 2, "recompute": False, **row} for row in summarise(result)]


@pytest.mark.usefixtures("_one_rank")
def test_counts_that_break_the_promise_of_a_plan_are_found() -> None:
    rows = rows_of(steps(1, {}, 0.1)[0])
    assert all(_counts_hold(row) for row in rows)
    plan, live = rows[2], rows[0]
    for name in (WAITS, COPIES, GATHERS):
        assert not _counts_hold({**plan, name: 1.0})
    assert not _counts_hold({**plan, PLANS: 0.0})
    assert not _counts_hold({**live, WAITS: 0.0})
