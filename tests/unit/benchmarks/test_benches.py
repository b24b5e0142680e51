"""The benchmarks on the CPU: when their rounds end, what a row claims, which rows they refuse."""

from __future__ import annotations

import json
import os
import random
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_r3.data.store import RolloutStore
from megatron_r3.data.store.expert_load import expert_load
from proof.benchmarks import balance, dispatch, publish, scale, store
from proof.benchmarks.bench import Bench, Row
from proof.benchmarks.interval import LOOKS
from proof.benchmarks.turns import Rounds
from proof.benchmarks.waits import COPIES, GATHERS, PLANS, WAITS

CI = (Path(__file__).parents[3] / ".ci" / "run").read_text()
MODES = dispatch.MODES


# -- rounds


def steps(most: int, slow: dict[str, float], spread: float) -> tuple[Rounds, list[str]]:
    """Run steps of made-up times until the last one: the rounds, and the way that each step went.

    Args:
        most: rounds at most.
        slow: how many times as long as the first way the other ways take.
        spread: of the times, as a share of them.
    """
    draw, rounds, went, last = random.Random(0), Rounds(most, MODES), [], False
    while not last:
        went.append(rounds.mode())
        taken = slow.get(went[-1], 1.0) * draw.lognormvariate(0.0, spread)
        last = rounds.close_step([taken, 0.5 * taken])
    return rounds, went


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(
    ("most", "slow", "spread", "timed", "said"),
    [
        (32, {}, 0.1, 32, "cannot tell (0."),  # only noise, and nothing is claimed
        (32, {"replay": 1.3, "plan": 0.8}, 0.02, LOOKS[0], ""),
        (16, {"plan": 0.8}, 0.02, 16, ""),  # one way that cannot be told keeps all going
        (1, {"replay": 1.3, "plan": 0.8}, 0.02, 1, "cannot tell (1 value)"),  # what CI runs
    ],
)
def test_rounds_end_when_every_ratio_tells(
    most: int, slow: dict[str, float], spread: float, timed: int, said: str
) -> None:
    rounds, went = steps(most, slow, spread)
    assert len(went) == rounds.done == len(rounds.ways) * (1 + timed + 1)  # the first, the last too
    assert rounds.ways == ("live", "live again", "replay", "plan")
    assert Counter(went)["live"] == 2 * Counter(went)["plan"]
    for row in rows_of_dispatch(rounds)[1:]:
        shown = " ".join(dispatch.BENCH.cells(row))
        if said:
            assert shown.count(said) == 2
            assert not row["wall_of_live"]["tells"]
        elif row["mode"] == "live again":  # the same twice: whatever is said of it is wrong
            assert not row["wall_of_live"]["tells"]
            assert row["cpu_of_live"]["low"] <= 1 <= row["cpu_of_live"]["high"]
        elif row["mode"] in slow:
            assert row["cpu_of_live"]["median"] == pytest.approx(slow[row["mode"]], rel=0.05)
            assert row["cpu_of_live"]["tells"]
            assert "cannot tell" not in shown


def test_nothing_is_prepared_before_its_step_begins() -> None:
    rounds, prepared = Rounds(1, MODES), threading.Event()
    thread = threading.Thread(target=lambda: (rounds.wait_for(1), prepared.set()), daemon=True)
    rounds.open_step()
    thread.start()
    assert not prepared.wait(0.1)
    rounds.done = 1
    rounds.open_step()
    assert prepared.wait(10)


# -- rows, and those that are refused


def rows_of_dispatch(rounds: Rounds) -> list[Row]:
    """Of 8 passes of MoE layers."""
    live = {"experts": 8, WAITS: 8, COPIES: 8}
    counts = dict.fromkeys(rounds.ways, live) | {"plan": {"experts": 8, PLANS: 2}}
    result = {
        "wall_s": rounds.wall_s,
        "cpu_s": rounds.cpu_s,
        "counts": {mode: Counter(of_mode) for mode, of_mode in counts.items()},
        **{"planning_s": 0.001, "checking_s": 0.001},
    }
    return [{"ep": 2, "recompute": False, **row} for row in dispatch.summarise(result)]


PUBLISHED = {"hidden": 8, "layers": 4, "layout": "EP2", "layer": 10**8, "memory": 1.2 * 10**8}
OF_GUESTS = {"way": balance.GUESTS, "load": 1.01, "limit": 1.02}
COUNTED = {"what": "opens", "found": 1.0, "most": 1.0, "counted": True}


@pytest.mark.usefixtures("_one_rank")
def test_rows_that_break_a_promise_are_found() -> None:
    live, again, replay, plan = rows_of_dispatch(steps(1, {}, 0.1)[0])
    table: list[tuple[Bench, Row, list[Row]]] = [
        (dispatch.BENCH, live, [{WAITS: 0.0}, {COPIES: 0.0}]),
        (dispatch.BENCH, again, [{WAITS: 0.0}]),
        (dispatch.BENCH, replay, [{WAITS: 0.0}]),
        (dispatch.BENCH, plan, [{WAITS: 1.0}, {COPIES: 1.0}, {GATHERS: 1.0}, {PLANS: 0.0}]),
        (publish.BENCH, PUBLISHED, [{"memory": 2 * 10**8}]),
        (balance.BENCH, OF_GUESTS, [{"load": 1.03}]),
        (scale.BENCH, COUNTED, [{"found": 1.1}]),
    ]
    for bench, row, faults in table:
        assert bench.wrong(row) == ""
        assert all(bench.wrong({**row, **fault}) for fault in faults), (bench.name, row)
    assert balance.BENCH.wrong({**OF_GUESTS, "way": balance.OFF, "load": 1.5}) == ""
    assert scale.BENCH.wrong({**COUNTED, "counted": False, "found": 9.0}) == ""  # a time


@pytest.mark.parametrize("name", balance.CASES)
def test_the_first_rank_has_its_share(name: str, tmp_path: Path) -> None:
    case = balance.CASES[name]
    balance.routes_of(case, tmp_path / "store")
    store = RolloutStore([tmp_path / "store"])
    load = sum(expert_load(store, rollout) for rollout in range(len(store)))
    of_first, *of_others = (load.reshape(2, case.ep, -1).sum(2) / load.sum(1)[0]).T
    assert of_first == pytest.approx(case.share, abs=0.02)
    for share in of_others:
        assert share == pytest.approx((1 - case.share) / (case.ep - 1), abs=0.02)


# -- the store


def test_a_slice_that_reads_too_much_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ways = {way.what: way for way in store._ours(1, tmp_path)}
    way = ways["slice of a PP4 x CP2 rank"]
    way.before()
    way.run()
    with pytest.raises(AssertionError, match="bytes read for a slice"):
        way.run()  # the same shards again: twice the bytes


# -- scale


def test_what_is_asked_of_files_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100))
    with scale.counted() as counts:
        descriptor = os.open(tmp_path / "a", os.O_RDONLY)
        os.preadv(descriptor, [bytearray(64)], 60)
        os.fstat(descriptor)
        os.close(descriptor)
        os.stat(tmp_path)
        os.listdir(tmp_path)
    assert counts == {"opens": 1, "stats": 2, "listings": 1, "bytes": 40}
    os.stat(tmp_path)  # control: outside of the block nothing is counted
    assert counts["stats"] == 2


# -- the commands


@pytest.mark.parametrize(
    ("bench", "argv", "said"),
    [
        (store.BENCH, ["--tokens", "0"], "--tokens 0: must be at least 1"),
        (dispatch.BENCH, ["--rounds", "0"], "--rounds 0: must be at least 1"),
        (dispatch.BENCH, ["--only", "EP3"], "no case has this in its name: EP1; EP1 full"),
    ],
)
def test_what_measures_nothing_is_refused(bench, argv, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as refusal:
        bench.main(["--out", str(tmp_path / "out"), *argv])
    assert refusal.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_command_prints_records_and_refuses(tmp_path, capsys):
    def measure(args: Any) -> Any:
        yield from ({"name": name, "value": value} for name, value in args.cases.items())

    bench = Bench(
        "made up",
        "A doc.",
        {"case": lambda row: row["name"], "": lambda row: f"{row['value']:.1f}"},
        measure,
        lambda row: "too large" if row["value"] > 2 else "",
        {"one": 1, "three": 3},
    )
    out = tmp_path / "out.json"
    assert bench.main(["--out", str(out), "--only", "one"]) == 0
    assert capsys.readouterr().out.endswith("| case |  |\n| --- | --- |\n| one | 1.0 |\n")
    assert bench.main(["--out", str(out)]) == 1
    assert capsys.readouterr().err == "error: three 3.0: too large\n"
    found = json.loads(out.read_text())
    assert [row["value"] for row in found["rows"]] == [1, 3]
    assert {"processor", "load", "cores"} <= found.keys()


CASES = {
    "dispatch": (dispatch.CASES, ["EP2 full"]),
    "publish": (publish.LAYOUTS, ["EP2"]),
    "balance": (balance.CASES, ["EP2, 75 %, 2 slots"]),
}


@pytest.mark.parametrize("name", CASES)
def test_ci_measures_a_case_of_two_ranks(name: str) -> None:
    cases, wanted = CASES[name]
    (only,) = re.findall(rf'^step make bench-{name} .*\bONLY="?([^"\n]+)', CI, re.MULTILINE)
    assert [case for case in cases if only in case] == wanted
