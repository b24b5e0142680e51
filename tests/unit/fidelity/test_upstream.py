"""Upstream's tests on two trees: what ranks record, how it is read and compared; no Megatron."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proof.fidelity import upstream
from proof.fidelity.rig.forkserver import run_ranks
from proof.fidelity.rig.rank_process import RankError, RankTimeout
from proof.fidelity.upstream import Outcomes, Recorder, Suite, differing, read_records

FILE = "test_file.py"
LATE = "no result: exit status 1\n--- log of rank 1\n..F.Timeout (0:01:00)!"
SAME: Outcomes = {"a": ("passed", ""), "b": ("failed", "world_size (1)")}


def write(folder: Path, rank: int, collected: list[str], **outcomes: str) -> Path:
    """A rank's records, as a Recorder writes them."""
    lines: list[Any] = [collected]
    lines += [{"id": test, "outcome": end, "why": f"{rank}"} for test, end in outcomes.items()]
    file = folder / f"rank{rank}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


class Ranks:
    """Stands for a TreeWorker: each of its runs writes records, and may raise."""

    tree = Path("tree")

    def __init__(self, *runs: tuple[list[dict[str, str]], Exception | None]) -> None:
        self.runs, self.done = list(runs), []

    def run(self, fn: object, world_size: int, *args: Any, timeout_s: float) -> None:
        _, file, folder, done = args
        assert (fn, file) == (upstream.as_rank, FILE)
        self.done.append(sorted(done))
        records, error = self.runs.pop(0)
        for rank, outcomes in enumerate(records):
            left = [test for test in ("a", "b", "c") if test not in done]
            write(folder, rank, left, **outcomes)
        if error:
            raise error


def endings(outcomes: Outcomes) -> dict[str, str]:
    return {test: end for test, (end, _) in outcomes.items()}


@pytest.mark.parametrize(
    ("unpatched", "patched", "differ"),
    [
        (SAME, SAME | {"b": ("failed", "world_size (2)")}, []),  # for another reason
        (SAME, SAME | {"a": ("failed", "assert 0")}, ["a"]),
        (SAME, {"a": SAME["a"]}, ["b"]),  # missing on either side
        ({"a": SAME["a"]}, SAME, ["b"]),
        ({"a": ("hung", "")}, {"a": ("hung", "")}, []),
        ({"a": ("hung", "")}, {"a": ("passed", ""), "b": ("hung", "")}, ["a", "b"]),
    ],
)
def test_what_differs(unpatched: Outcomes, patched: Outcomes, differ: list[str]) -> None:
    assert differing(unpatched, patched) == differ


def test_the_worst_rank_counts(tmp_path: Path) -> None:
    files = [
        write(tmp_path, 0, ["a", "b", "c"], a="passed", b="failed", c="skipped"),
        write(tmp_path, 1, ["a", "b", "c"], a="error", b="passed", c="passed"),
    ]
    collected, ended = read_records(files)
    assert collected == ["a", "b", "c"]
    assert ended == {"a": ("error", "1"), "b": ("failed", "0"), "c": ("skipped", "0")}


def test_what_only_some_ranks_ended_has_not_ended(tmp_path: Path) -> None:
    files = [write(tmp_path, 0, ["a", "b"], a="passed", b="failed")]
    files += [write(tmp_path, 1, ["a", "b"], a="passed"), tmp_path / "rank2.jsonl"]
    assert list(read_records(files[:2])[1]) == ["a"]
    assert read_records(files) == (["a", "b"], {})


def test_fresh_ranks_go_on_after_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "BATCH", 2)
    ranks: Any = Ranks(([{"a": "passed", "b": "failed"}], None), ([{"c": "passed"}], None))
    outcomes = Suite(ranks, tmp_path).run(FILE, 1)
    assert endings(outcomes) == {"a": "passed", "b": "failed", "c": "passed"}
    assert ranks.done == [[], ["a", "b"]]


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (RankError(1, LATE), "hung"),
        (RankTimeout(0, "ranks 0, 1 ran past 60 s"), "hung"),
        (RankError(1, "no result: SIGSEGV"), "died"),
    ],
)
def test_fresh_ranks_go_on_after_one_that_hangs_or_dies(error, ending, tmp_path):
    half = [{"a": "passed", "b": "failed"}, {"a": "passed"}]
    ranks: Any = Ranks((half, error), ([{"c": "passed"}] * 2, None))
    outcomes = Suite(ranks, tmp_path).run(FILE, 2)
    assert endings(outcomes) == {"a": "passed", "b": ending, "c": "passed"}
    assert outcomes["b"] == (ending, error.text)
    assert ranks.done == [[], ["a", "b"]]


ALL = dict.fromkeys(("a", "b", "c"), "passed")
CRASH = "no result: SIGSEGV"


@pytest.mark.parametrize(
    ("records", "error", "ends"),
    [
        # hanging in the last test
        ([{"a": "passed", "b": "passed"}], RankError(0, LATE), {**ALL, "c": "hung"}),
        # pytest that cannot start stands for the file
        ([], RankError(0, "pytest ended with 4 before it had any test"), {FILE: "died"}),
        # so do ranks that die after their tests
        ([ALL], RankError(0, CRASH), {**ALL, FILE: "died"}),
        # a test that one rank lacks ends the search
        ([ALL, {"a": "passed", "b": "passed"}], None, {**ALL, "c": "died"}),
    ],
)
def test_an_end_that_no_fresh_ranks_follow(records, error, ends, tmp_path):
    ranks: Any = Ranks((records, error))
    assert endings(Suite(ranks, tmp_path).run(FILE, max(len(records), 1))) == ends


TESTS = """
import pytest

@pytest.fixture
def broken():
    raise ValueError("set-up")

@pytest.fixture
def leaves():
    yield
    raise ValueError("tear-down")

def test_passes(): pass
def test_fails(): assert 1 == 2
def test_set_up(broken): pass
def test_tear_down(leaves): pass
def test_skips(): pytest.skip("no GPU")
@pytest.mark.xfail
def test_xfails(): assert 0
def test_done(): pass
"""


def test_what_a_recorder_writes(tmp_path: Path, pytester_ini: list[str]) -> None:
    tests = tmp_path / FILE
    tests.write_text(TESTS)
    calls: list[int] = []
    done = [f"{FILE}::test_done"]
    recorder = Recorder([tmp_path / "rank0.jsonl"], 0, done, lambda: calls.append(1))
    pytest.main([*pytester_ini, f"--rootdir={tmp_path}", str(tests)], plugins=[recorder])
    collected, ended = read_records([recorder.records])
    assert {test.partition("::")[2]: end for test, end in ended.items()} == {
        "test_passes": ("passed", ""),
        "test_fails": ("failed", "assert 1 == 2"),
        "test_set_up": ("error", "ValueError: set-up"),
        "test_tear_down": ("error", "ValueError: tear-down"),
        "test_skips": ("skipped", "Skipped: no GPU"),
        "test_xfails": ("skipped", "assert 0"),
    }
    assert collected == list(ended)
    assert len(calls) == 6


def test_a_file_that_cannot_be_imported(tmp_path: Path, pytester_ini: list[str]) -> None:
    tests = tmp_path / "test_broken.py"  # pytest imports a name once
    tests.write_text("import no_such_module")
    recorder = Recorder([tmp_path / "rank0.jsonl"], 0)
    pytest.main([*pytester_ini, f"--rootdir={tmp_path}", str(tests)], plugins=[recorder])
    collected, ended = read_records([recorder.records])
    assert collected == []
    assert endings(ended) == {"test_broken.py": "error"}
    assert "No module named 'no_such_module'" in ended["test_broken.py"][1]


def test_a_test_that_hangs_ends_its_rank_and_says_where(tmp_path, pytester_ini, monkeypatch):
    monkeypatch.setattr(upstream, "TEST_S", 2.0)
    tests = tmp_path / "test_hangs.py"  # pytest imports a name once
    tests.write_text("import time\ndef test_ends(): pass\ndef test_waits(): time.sleep(60)\n")
    recorder = Recorder([tmp_path / "rank0.jsonl"], 0)
    options = [*pytester_ini, "-s", f"--rootdir={tmp_path}", str(tests)]
    with pytest.raises(RankError, match="in test_waits") as caught:
        run_ranks(lambda rank: pytest.main(options, plugins=[recorder]), 1, timeout_s=30.0)
    assert upstream._ending(caught.value) == "hung"
    assert list(read_records([recorder.records])[1]) == ["test_hangs.py::test_ends"]


@pytest.fixture
def pytester_ini(tmp_path: Path) -> list[str]:
    """Options of a pytest inside of this one."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    ini = ["-c", str(tmp_path / "pytest.ini"), "-p", "no:cacheprovider", "-q"]
    return [*ini, "-p", "no:faulthandler", "-p", "no:hypothesispytest"]
