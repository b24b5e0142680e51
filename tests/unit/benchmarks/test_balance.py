"""The benchmarks of guest experts: their made-up routes, what they refuse, what CI runs of them.

Shape suffixes (docs/glossary.md): E, L.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_r3.data.store import RolloutStore
from proof.benchmarks import balance, balance_simulated
from proof.benchmarks.balance import CASES, write_store
from proof.benchmarks.balance_simulated import DEEPSEEK, Parts, Shape, chances, draw_loads, simulate

CI = Path(__file__).parents[3] / ".ci" / "run"


@pytest.mark.parametrize("name", CASES)
def test_the_first_rank_has_its_share(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (shard,) = RolloutStore([write_store(tmp_path / "store", case)]).shards
    load_LE = shard.expert_load().sum(0)
    of_first, *of_others = (load_LE.reshape(2, case.ep, -1).sum(2) / load_LE.sum(1)[0]).T
    assert of_first == pytest.approx(case.share, abs=0.02)
    for share in of_others:
        assert share == pytest.approx((1 - case.share) / (case.ep - 1), abs=0.02)


def results_of(seconds: dict[str, float]) -> list[dict[str, Any]]:
    """What two ranks return that took so long a step in each way, twice."""
    same = {way: [taken, taken] for way, taken in seconds.items()}
    one = {
        **{f"{name}_s": same for name in ("wall", "cpu", "layer")},
        "load": dict.fromkeys(seconds, 1.5),
        "planning_s": dict.fromkeys(seconds, 0.001),
        "guests": 1.0,
        "bytes": 10.0,
        "waiting_s": 0.004,
    }
    other = {**one, "planning_s": dict.fromkeys(seconds, 0.002), "guests": 2.0, "bytes": 30.0}
    return [one, other]


def test_a_row_has_the_ratio_and_the_slowest_planning() -> None:
    off, empty, guests = balance.summarise(results_of({"off": 2.0, "empty": 2.0, "guests": 1.6}))
    assert off["wall_of_off"] is None
    assert guests["cpu_of_off"]["median"] == pytest.approx(0.8)
    assert guests["planning_ms"] == pytest.approx(2.0)
    assert (guests["guests"], guests["bytes"], guests["waiting_ms"]) == (1.5, 20.0, 4.0)
    assert "guests" not in empty


def test_chances_are_those_of_draws_without_replacement() -> None:
    weight_E = np.array([4.0, 2.0, 1.0, 1.0, 0.5, 0.5])
    rng = np.random.default_rng(0)
    drawn = (np.log(weight_E) + rng.gumbel(size=(200_000, 6))).argsort(1)[:, -2:]
    found_E = np.bincount(drawn.ravel(), minlength=6) / len(drawn)
    assert chances(weight_E[None], 2)[0] == pytest.approx(found_E, abs=0.05)
    assert chances(weight_E[None], 2).sum() == pytest.approx(2)


def test_guests_even_a_simulated_load_out() -> None:
    """The control is a load without hot experts, which guests have nothing to do with."""
    shape = Shape(2, 32, 4)
    hot, even = (draw_loads(shape, Parts(*parts), 64) for parts in ((1.0, 0.3, 0.2), (0, 0, 0)))
    assert hot.shape == (64, 2, 32)
    (row,) = simulate(hot, [8])
    assert row["store"] > 1.3
    assert row["2 slots"] < 1.05
    (control,) = simulate(even, [8])
    assert control["store"] == pytest.approx(1, abs=0.02)
    assert control["guests"] == 0


@pytest.mark.parametrize(
    "argv", [["--only", "none"], ["--rollouts", "40"], ["--rollouts", "16"]], ids=" ".join
)
def test_what_simulates_nothing_is_refused(argv: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as refusal:
        balance_simulated.main(["--out", str(tmp_path / "out"), *argv])
    assert refusal.value.code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("argv", [["--rounds", "0"], ["--only", "EP3"]], ids=" ".join)
def test_what_measures_nothing_is_refused(argv: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as refusal:
        balance.main(["--out", str(tmp_path / "out"), *argv])
    assert refusal.value.code == 2
    assert not (tmp_path / "out").exists()


def test_a_simulation_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"small": (DEEPSEEK._replace(layers=1), Parts(0.3, 0.2, 0.1))}
    monkeypatch.setattr(balance_simulated, "CASES", small)
    assert balance_simulated.main(["--out", str(tmp_path / "out"), "--rollouts", "32"]) == 0
    assert capsys.readouterr().out.startswith("SIMULATED")
    found = json.loads((tmp_path / "out").read_text())
    assert found["simulated"] is True
    assert [row["ep"] for row in found["rows"]] == [8]


def test_ci_runs_a_case_of_each() -> None:
    asked = dict(re.findall(r"^\w.* make (bench-balance\S*) .*\bONLY=(\S+)", CI.read_text(), re.M))
    assert [n for n in CASES if asked["bench-balance"] in n] == ["EP2, 75 %, 2 slots"]
    simulated = asked["bench-balance-simulated"]
    assert [n for n in balance_simulated.CASES if simulated in n] == ["DeepSeek-V3, low"]
