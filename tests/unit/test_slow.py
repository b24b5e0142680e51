"""What `make test` leaves out is there, and values that are quick are told from the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from slow import SLOW, slow_except

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("beginning", SLOW)
def test_what_is_left_out_is_there(beginning: str) -> None:
    files = [file.relative_to(TESTS).as_posix() for file in TESTS.rglob("test_*.py")]
    assert any(file.startswith(beginning) for file in files)


def test_the_quick_values_alone_have_no_mark() -> None:
    quick, slow = slow_except(["a", "b"], "a")
    assert quick == "a"
    assert slow == pytest.param("b", marks=pytest.mark.slow)
    with pytest.raises(ValueError, match=r"\['c'\] are not among \['a', 'b'\]"):
        slow_except(["a", "b"], "c")
