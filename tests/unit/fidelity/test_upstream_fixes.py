"""What `make upstream` calls right and wrong; the tests themselves run by hand, on a clone."""

from __future__ import annotations

import re

import pytest

from megatron_r3.patching.git import PatchingError
from megatron_r3.patching.series import read_series
from megatron_r3.patching.versions import patches_folder, read_versions
from proof.fidelity.upstream_fixes import COLUMNS, GROUPS, LINES, chosen, diffs_of, judged, touched

NAMES = re.compile(rb"R3|megatron_r3|moe_router_replay|[Rr]ollout")


@pytest.mark.parametrize("line", LINES)
def test_each_fix_has_tests_of_megatrons_suite(line: str) -> None:
    diffs = diffs_of(read_versions(patches_folder()).line(line))
    assert all(touched(diff) for diff in diffs)


@pytest.mark.parametrize("line", LINES)
def test_a_fix_that_names_this_project_could_not_be_sent(line: str) -> None:
    series = read_series(patches_folder() / line)
    added = {
        patch.group: [row for c in patch.changes for row in c.diff.splitlines() if row[:1] == b"+"]
        for patch in series.patches
    }
    named = {group for group, rows in added.items() if any(NAMES.search(row) for row in rows)}
    assert not named & {*GROUPS}
    assert "r3" in named  # the control


def test_a_text_that_chooses_nothing_is_an_error() -> None:
    assert chosen({"a/test_b.py", "a/test_c.py"}, ["_c"]) == ["a/test_c.py"]
    with pytest.raises(PatchingError, match="--only x: no test file has such a text"):
        chosen({"a/test_b.py"}, ["x"])


def ends(*outcomes: str) -> dict[str, dict[str, tuple[str, str]]]:
    """How one test ended on each copy; "none" where a copy lacks it."""
    pairs = zip(COLUMNS, outcomes, strict=True)
    return {name: {} if how == "none" else {"f::test": (how, "why")} for name, how in pairs}


@pytest.mark.parametrize(
    ("outcomes", "ours", "wrong"),
    [
        (("passed", "passed", "passed"), False, ""),
        (("failed", "failed", "failed"), False, ""),
        (("passed", "passed", "failed"), False, "fixed: failed why"),
        (("none", "failed", "passed"), True, ""),
        (("passed", "failed", "passed"), True, ""),  # one that a diff changes
        (("passed", "none", "none"), False, ""),  # one that a diff removes
        (("none", "failed", "failed"), True, "fixed: failed why"),
        (("none", "passed", "passed"), True, "none of our tests fails without the patches"),
    ],
)
def test_what_is_wrong(outcomes: tuple[str, str, str], ours: bool, wrong: str) -> None:
    rows, said = judged("f", ends(*outcomes))
    assert bool(rows) == ours
    assert wrong in "\n".join(said) if wrong else said == []
