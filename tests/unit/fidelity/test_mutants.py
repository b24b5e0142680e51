"""The faults of tests/mutants are all in the package, and the runner tells them apart."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from slow import SLOW

from proof.fidelity import mutants
from proof.fidelity.mutants import Fault, main, outcome, place_of, read_faults

FAULTS = read_faults()
BOTH = Fault("room", "both", "effect", "old", "new", ("unit",), ("functional",))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.room}: {f.name}")
def test_each_fault_is_in_the_package_and_has_its_tests(fault: Fault) -> None:
    file = mutants.ROOT / place_of(fault)
    assert fault.old != fault.new
    compile(file.read_text().replace(fault.old, fault.new), str(file), "exec")
    for test in (*fault.tests, *fault.functional):
        path, _, name = test.partition("::")
        assert (mutants.ROOT / path).exists()
        assert not name or f"def {name}(" in (mutants.ROOT / path).read_text()
    assert fault.tests or fault.functional
    left_out = tuple(f"tests/{beginning}" for beginning in SLOW)
    assert not any(test.startswith(left_out) for test in (*fault.tests, *fault.functional))


def test_there_are_faults_in_every_room() -> None:
    assert len(FAULTS) >= 80
    changed = {str(place_of(fault)).split("/")[1] for fault in FAULTS}
    rooms = "replay data train seams balance frameworks loop patching weights"
    assert changed >= {*rooms.split()}


@pytest.mark.parametrize("text", ["a text that the package does not have", "import annotations"])
def test_a_text_that_is_not_there_once_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="must be there once"):
        place_of(replace(BOTH, old=text))


class Copy:
    """Notices a fault with some of the tests."""

    def __init__(self, *noticing: str) -> None:
        self.noticing, self.asked = noticing, []  # type: ignore[var-annotated]

    def notices(self, fault: Fault, tests: Sequence[str]) -> bool:
        self.asked += tests
        return any(test in self.noticing for test in tests)


@pytest.mark.parametrize(
    ("noticing", "unit_alone", "fault", "how", "asked"),
    [
        (["unit"], False, BOTH, "unit", ["unit"]),
        (["functional"], False, BOTH, "functional", ["unit", "functional"]),
        (["functional"], True, BOTH, "survived", ["unit"]),
        ([], False, BOTH, "survived", ["unit", "functional"]),
        ([], False, replace(BOTH, unseen="why"), "unseen", ["unit", "functional"]),
    ],
)
def test_how_a_fault_ends(noticing, unit_alone, fault, how, asked):
    copy: Any = Copy(*noticing)
    assert outcome(copy, fault, unit_alone) == how
    assert copy.asked == asked


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one function, its test, and two faults."""
    files = {
        "megatron_r3/__init__.py": (
            "def twice(x):\n    return 2 * x\n\n\ndef same(x):\n    return x\n"
        ),
        "tests/test_it.py": "import megatron_r3 as m\n\ndef test():\n    assert m.twice(3) == 6\n",
        # `make test` leaves it out, so that it must not notice anything
        "tests/test_slow.py": (
            "import pytest\nimport megatron_r3 as m\n\n"
            "@pytest.mark.slow\ndef test():\n    assert m.same(3) == 3\n"
        ),
        "tests/mutants/room.toml": (
            'tests = ["tests/test_it.py"]\nfunctional = ["tests/test_slow.py"]\n'
            '[[mutant]]\nname = "thrice"\neffect = "e"\nold = "2 * x"\nnew = "3 * x"\n'
            '[[mutant]]\nname = "nobody"\neffect = "e"\nold = "return x"\nnew = "return 0"\n'
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "build").mkdir()
    for command in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "FAULTS", tmp_path / "tests" / "mutants")
    monkeypatch.setattr(read_faults, "__defaults__", (tmp_path / "tests" / "mutants",))
    return tmp_path


@pytest.mark.slow
def test_a_fault_is_put_in_noticed_and_taken_out(small, capsys):
    assert main(["--jobs", "1"]) == 1
    printed = capsys.readouterr().out
    assert "unit        room: thrice\nsurvived    room: nobody\n" in printed
    assert main(["--jobs", "1", "--only", "thrice"]) == 0
    assert main(["--jobs", "1", "--only", "none such"]) == 2


def test_tests_that_fail_without_a_fault_are_an_error(small, capsys):
    (small / "tests" / "test_it.py").write_text("def test():\n    assert 0\n")
    subprocess.run(["git", "add", "."], cwd=small, check=True)
    assert main(["--jobs", "1"]) == 2
    assert "FAILED tests/test_it.py::test" in capsys.readouterr().err
