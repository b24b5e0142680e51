"""The page of the benchmarks is what `python -m proof.benchmarks.report` makes of the results."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from proof.benchmarks import report
from proof.benchmarks.report import with_tables

ROOT = Path(__file__).parents[3]
RESULTS, PAGE = "proof/benchmarks/results", "proof/benchmarks/README.md"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout's page and results, which the command takes."""
    monkeypatch.setattr(report, "ROOT", tmp_path)
    shutil.copytree(ROOT / RESULTS, tmp_path / RESULTS)
    shutil.copy(ROOT / PAGE, tmp_path / PAGE)
    return tmp_path


def is_right(root: Path) -> bool:
    page, text = with_tables(root)
    return page.read_text() == text


def test_the_page_is_made_of_the_recorded_results() -> None:
    assert is_right(ROOT)


def test_nothing_was_run_on_a_gpu_as_long_as_no_result_says_so() -> None:
    """Whoever commits the first result of a GPU has to write what it shows, here too."""
    names = [path.name for path in (ROOT / RESULTS).iterdir()]
    assert [name for name in names if "-cpu-" not in name] == ["comparison.json"]
    assert "| **not run on** | **CUDA, " in (ROOT / "README.md").read_text()
    assert "\nNothing was run on a GPU.\n" in (ROOT / "docs" / "gpu.md").read_text()


def test_a_page_that_was_changed_by_hand_is_found(root: Path) -> None:
    before = (root / PAGE).read_text()
    assert before.count("| 4 | full | plan |") == 1
    (root / PAGE).write_text(before.replace("| 4 | full | plan |", "| 4 | full | plan, faster |"))
    assert not is_right(root)


def test_the_command(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for recorded in (root / RESULTS).glob("store-cpu-*.json"):
        recorded.unlink()
    assert report.main() == 0
    assert "README.md" in capsys.readouterr().out
    assert "No run is recorded." in (root / PAGE).read_text()
    assert report.main() == 0
    assert capsys.readouterr().out == ""  # nothing is left to write


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_the_command_refuses_in_one_line(root, capsys, text):
    (root / RESULTS / "store-cpu-2099-01-01.json").write_text(text)
    before = (root / PAGE).read_text()
    assert report.main() == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "not a results file" in error
    assert error.count("\n") == 1
    assert (root / PAGE).read_text() == before


def test_a_page_without_a_place_for_a_table(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / PAGE).write_text("# no marker\n")
    assert report.main() == 1
    assert "README.md: expected once the line" in capsys.readouterr().err
