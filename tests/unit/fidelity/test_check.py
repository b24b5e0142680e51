"""What `make check` makes of upstream's tests, and what it prints; no Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proof.fidelity import check
from proof.fidelity.upstream import FOLDER, Outcomes

PASS: Outcomes = {"a": ("passed", ""), "b": ("failed", "no GPU")}
NONE: Outcomes = {"a": ("error", "no Transformer Engine")}


class Copies:
    """Two trees with one of upstream's files; a worker is the name of its tree."""

    def __init__(self, folder: Path, file: str = check.TESTS[0]) -> None:
        self.folder, self.unpatched, self.patched = folder, folder / "unpatched", folder / "patched"
        for tree in (self.unpatched, self.patched):
            (tree / FOLDER / file).parent.mkdir(parents=True)
            (tree / FOLDER / file).touch()

    def worker(self, tree: Path) -> str:
        return tree.name


def outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **ended: Outcomes
) -> tuple[bool | None, str]:
    class Suite:
        def __init__(self, worker: str, folder: Path) -> None:
            self.worker = worker

        def run(self, file: str, world_size: int) -> Outcomes:
            assert (file, world_size) == (check.TESTS[0], 1)
            return ended[self.worker]

    monkeypatch.setattr(check, "Suite", Suite)
    copies: Any = Copies(tmp_path)
    return check.upstreams_tests(copies)


def test_upstreams_tests_that_end_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, said = outcome(tmp_path, monkeypatch, unpatched=PASS, patched=PASS)
    assert (passed, said) == (True, "alike: test_router_replay.py 1 failed, 1 passed")


def test_one_that_fails_only_when_patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = PASS | {"a": ("failed", "assert 0")}
    passed, said = outcome(tmp_path, monkeypatch, unpatched=PASS, patched=broken)
    assert (passed, said) == (False, "a\n    unpatched: passed \n    patched: failed assert 0")


def test_none_that_passes_is_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, said = outcome(tmp_path, monkeypatch, unpatched=NONE, patched=NONE)
    assert passed is None
    assert said.endswith("the first: error no Transformer Engine")
    # but a difference is one, also where none passes unpatched
    passed, _ = outcome(tmp_path / "2", monkeypatch, unpatched=NONE, patched=PASS)
    assert passed is False


def test_a_tree_without_tests(tmp_path: Path) -> None:
    copies: Any = Copies(tmp_path, "test_something_else.py")
    passed, said = check.upstreams_tests(copies)
    assert passed is None
    assert "PyPI" in said
