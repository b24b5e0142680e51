"""docs/comparison.md is what `python -m proof.comparison.report` makes of the recorded comparison.

What the page says of results is tested on records that are made up here.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proof.comparison import report
from proof.comparison.arms import REGIMES, runs_of
from proof.comparison.measure import VALUES, half
from proof.comparison.picture import lines_of, smooth
from proof.comparison.report import NOTHING, document, read_record
from proof.comparison.run import as_json
from proof.comparison.table import claim, holds, pairs, summary, verdict

ROOT = Path(__file__).parents[3]
RESULTS = "proof/benchmarks/results"
FACTS = {"date": "2026-12-01", "processor": "made up", "machine": "x86_64", "cores": 2}
FACTS |= {"load": 0.1, "python": "3.11.2", "torch": "2.13.0", "collections": 12}


def made_up(only: str = "", seeds: int = 3, **changes: float) -> dict[str, Any]:
    """A record in which R3 learns and live does not; `live_reward=0.9` changes the runs of live."""
    runs = []
    for run in runs_of(only, seeds):
        rng = np.random.default_rng(run.seed)
        replays = "r3" in run.arm.key
        level = {"reward": 0.6 if replays else 0.4, "k3": 0.02 if replays else 0.8}
        level |= {"f2": 0.01, "router_mismatch": 0.6, "token_mismatch": 0.98, "entropy": 0.05}
        level |= {
            name: changes[f"{run.arm.key}_{name}"]
            for name in VALUES
            if f"{run.arm.key}_{name}" in changes
        }
        curves = {name: (level[name] * rng.uniform(0.95, 1.05, 12)).tolist() for name in VALUES}
        of = {"regime": run.regime.key, "arm": run.arm.key, "seed": run.seed, "seconds": 70}
        runs.append({**of, **curves})
    return {**FACTS, "runs": runs}


def recorded(tmp_path: Path, record: dict[str, Any] | None) -> Path:
    """A checkout's page, and a record beside it."""
    (tmp_path / "docs").mkdir()
    (tmp_path / RESULTS).mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "comparison.md", tmp_path / "docs")
    if record is not None:
        (tmp_path / "record.json").write_text(as_json(record))
    return tmp_path


def test_the_page_is_made_of_the_recorded_comparison() -> None:
    page = ROOT / "docs" / "comparison.md"
    assert document(ROOT) == page.read_text()
    assert (ROOT / "docs" / "comparison.png").exists() == report.results_of(ROOT).exists()


def test_a_page_that_was_changed_by_hand_is_found(tmp_path: Path) -> None:
    root = recorded(tmp_path, made_up())
    assert report.main(["--root", str(root), "--record", str(root / "record.json")]) == 0
    page = root / "docs" / "comparison.md"
    text = page.read_text()
    assert document(root) == text
    changed = text.replace(
        "above that of live in 3 of 3 seeds", "above that of live in 2 of 3 seeds"
    )
    assert changed != text
    page.write_text(changed)
    assert document(root) != changed


def test_without_a_record_the_page_says_so(tmp_path: Path) -> None:
    root = recorded(tmp_path, None)
    assert NOTHING in document(root)
    assert "reward in" not in document(root)


def test_the_command(tmp_path: Path) -> None:
    root = recorded(tmp_path, made_up())
    argv = [sys.executable, "-m", "proof.comparison.report", "--root", str(root)]
    argv += ["--record", str(root / "record.json")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = (root / "docs" / "comparison.md").read_text()
    assert NOTHING not in text
    made = text.partition("## What was run")[2]
    assert made.count("| live |") == 3 * 4  # three tables in each of four regimes
    assert made.count("| no mismatch |") == 3 * 2  # in the control, and with staleness alone
    assert (root / "docs" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((root / RESULTS / "comparison.json").read_text())
    assert results == json.loads(json.dumps(made_up()))


def test_the_claim_is_made_where_each_seed_shows_it() -> None:
    record = made_up("noise")
    assert holds(record) is True
    assert claim(record) == (
        "Under noise 0.7 R3 has at least 3 times lower k3 and a higher reward in each seed."
    )
    said = verdict(record, REGIMES["noise"])
    assert said.startswith("noise 0.7: the reward of R3 is above that of live in 3 of 3 seeds (+0.")
    assert said in summary(record)


def test_the_readme_says_what_was_recorded() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    found = re.search(r"k3 is at least (\d+) times lower, in each seed", text)
    assert found is not None
    record = read_record(ROOT / RESULTS / "comparison.json")
    both = list(pairs(record, "noise"))
    assert holds(record)
    assert len(both) == 3
    assert "with three seeds" in text
    least = min(half(live["k3"]) / half(r3["k3"]) for live, r3 in both)
    assert int(found[1]) <= least < 2 * int(found[1])


@pytest.mark.parametrize(
    ("changes", "above"), [({"live_reward": 0.9}, 0), ({"live_k3": 0.055}, 3), ({"r3_k3": 0.5}, 3)]
)
def test_the_claim_is_not_made_where_it_does_not_hold(
    changes: dict[str, float], above: int
) -> None:
    record = made_up("noise", **changes)
    assert holds(record) is False
    assert "R3 has NOT at least 3 times lower k3" in claim(record)
    assert f"in {above} of 3 seeds" in verdict(record, REGIMES["noise"])


def test_one_seed_that_does_not_hold_is_enough() -> None:
    record = made_up("noise")
    for run in record["runs"]:
        if (run["arm"], run["seed"]) == ("live", 2):
            run["reward"] = [0.9] * 12
    assert holds(record) is False
    assert "in 2 of 3 seeds" in verdict(record, REGIMES["noise"])


def test_without_a_pair_nothing_is_claimed() -> None:
    record = made_up("noise/live")
    assert holds(record) is None
    assert claim(record).startswith("No pair of live and R3 was run")
    assert verdict(record, REGIMES["noise"]) == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("load"), "no load"),
        (lambda r: r["runs"].clear(), "no run is complete"),
        (lambda r: r["runs"][1].update(arm="none"), r"noise/none-0: there is no such run"),
        (lambda r: r["runs"].append(r["runs"][0]), r"noise/live-0 is there twice"),
        (lambda r: r["runs"][0]["k3"].pop(), r"noise/live-0: k3 must be 12 finite numbers"),
        (lambda r: r["runs"][0]["f2"].__setitem__(3, float("nan")), r"f2 must be 12 finite"),
    ],
)
def test_a_record_that_cannot_be_taken_changes_nothing(
    change: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = made_up("noise")
    change(record)
    root = recorded(tmp_path, record)
    before = (root / "docs" / "comparison.md").read_text()
    assert report.main(["--root", str(root), "--record", str(root / "record.json")]) == 1
    with pytest.raises(ValueError, match=message):
        read_record(root / "record.json")
    assert (root / "docs" / "comparison.md").read_text() == before
    assert not report.results_of(root).exists()
    assert not (root / "docs" / "comparison.png").exists()


def test_a_panel_has_the_control_of_its_regime() -> None:
    record = made_up(none_reward=0.85)
    for key in ("noise", "stale"):
        lines = lines_of(record, REGIMES[key], "reward")
        assert [label for label, _ in lines.values()] == ["no mismatch", "live", "R3"]
        assert min(lines["none"][1].mean) > 0.75 > max(lines["r3"][1].mean)
        assert len(lines["live"][1].x) == 12
    without = {**record, "runs": [r for r in record["runs"] if r["regime"] == "noise"]}
    assert [*lines_of(without, REGIMES["noise"], "k3")] == ["live", "r3"]
    assert smooth([0.0, 1.0, 2.0, 3.0, 4.0, 5.0]) == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0]
