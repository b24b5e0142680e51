"""docs/comparison.md is what `python -m proof.comparison.report` makes of the recorded comparison.

What the page says of results is tested on records that are made up here.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from online_run import make_run

from proof.comparison import report
from proof.comparison.arms import runs_of
from proof.comparison.report import (
    METRICS,
    RESULTS,
    document,
    half,
    measured,
    pairs,
    read_record,
)

ROOT = Path(__file__).parents[3]
VALUES = ("reward", *METRICS)
FACTS = {"date": "2026-12-01", "processor": "made up", "machine": "x86_64", "cores": 2}
FACTS |= {"load": 0.1, "python": "3.11.2", "torch": "2.13.0", "collections": 12}


def made_up(only: str = "", **changes: float) -> dict[str, Any]:
    """A record in which R3 learns and live does not; `live_reward=0.9` changes the runs of live."""
    runs = []
    for run in runs_of(only):
        rng, replays = np.random.default_rng(run.seed), "r3" in run.arm
        level = {"reward": 0.6 if replays else 0.4, "k3": 0.02 if replays else 0.8}
        level |= {"router_mismatch": 0.6}
        level |= {name: changes.get(f"{run.arm}_{name}", level[name]) for name in VALUES}
        curves = {name: (level[name] * rng.uniform(0.95, 1.05, 12)).tolist() for name in VALUES}
        runs.append({**run._asdict(), "seconds": 70, **curves})
    return {**FACTS, "runs": runs}


def recorded(tmp_path: Path, record: dict[str, Any]) -> Path:
    """A checkout's page, and a record beside it."""
    (tmp_path / "docs").mkdir()
    (tmp_path / RESULTS).parent.mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "comparison.md", tmp_path / "docs")
    (tmp_path / "record.json").write_text(report.as_json(record))
    return tmp_path


def test_the_page_is_made_of_the_recorded_comparison() -> None:
    assert document(ROOT) == (ROOT / "docs" / "comparison.md").read_text()
    assert (ROOT / "docs" / "comparison.png").exists() == (ROOT / RESULTS).exists()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = recorded(tmp_path, made_up())
    monkeypatch.setattr(report, "ROOT", root)
    page = root / "docs" / "comparison.md"
    assert "No run is recorded." in document(root)
    assert report.main(["--record", str(root / "record.json")]) == 0
    text = page.read_text()
    made = text.partition("## What was run")[2]
    assert made.count("| live |") == 4
    assert made.count("| no mismatch |") == 2  # in the control, and with staleness alone
    assert "| noise 0.7 | 3 of 3 | +0.2" in made
    assert (root / "docs" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((root / RESULTS).read_text()) == json.loads(json.dumps(made_up()))
    changed = text.replace("| noise 0.7 | 3 of 3 |", "| noise 0.7 | 2 of 3 |")
    page.write_text(changed)
    assert document(root) == text != changed  # a page that was changed by hand is found


def test_the_readme_says_what_was_recorded() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    found = re.search(r"k3 is at least (\d+) times lower, in each seed", text)
    assert found is not None
    both = list(pairs(read_record(ROOT / RESULTS), "noise"))
    assert len(both) == 3
    assert "with three seeds" in text
    assert all(half(r3["reward"]) > half(live["reward"]) for live, r3 in both)
    least = min(half(live["k3"]) / half(r3["k3"]) for live, r3 in both)
    assert int(found[1]) <= least < 2 * int(found[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("load"), "no load"),
        (lambda r: r["runs"].clear(), "no run is complete"),
    ],
)
def test_a_record_that_cannot_be_taken_changes_nothing(change, message, tmp_path, monkeypatch):
    record = made_up("noise")
    change(record)
    root = recorded(tmp_path, record)
    monkeypatch.setattr(report, "ROOT", root)
    before = (root / "docs" / "comparison.md").read_text()
    assert report.main(["--record", str(root / "record.json")]) == 1
    with pytest.raises(ValueError, match=message):
        read_record(root / "record.json")
    assert (root / "docs" / "comparison.md").read_text() == before
    assert not (root / RESULTS).exists()
    assert not (root / "docs" / "comparison.png").exists()


def test_a_collection_has_the_values_of_its_first_update(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=20)
    found = measured(run, collections=10, steps=2)
    file = run / "metrics.jsonl"
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    for name, metric in METRICS.items():
        assert found[name] == [float(f"{line[metric]:.5g}") for line in steps[::2]]
        assert found[name] != [float(f"{line[metric]:.5g}") for line in steps[1::2]]
    assert len(found["reward"]) == 10
    with pytest.raises(ValueError, match="reward of collection 10 is missing"):
        measured(run, collections=11, steps=2)
    file.write_text("".join(json.dumps(line) + "\n" for line in steps[:-2]))
    with pytest.raises(ValueError, match="k3 kl in step 19 is missing or not finite"):
        measured(run, collections=10, steps=2)
    assert half([1, 2, 6]) == 4
