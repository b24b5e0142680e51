"""Groups of patches: all on a release, those that fit on another tree, some on request."""

import re

import pytest
from patching_upstream import (
    DISPATCHER,
    LINE,
    NEW,
    OLD,
    README,
    ROUTER,
    SCHEDULE,
    TAG,
    commit,
    refused,
    run_cli,
    snapshot,
)

from megatron_r3.patching.apply import apply_series, revert_series
from megatron_r3.patching.git import PatchingError
from megatron_r3.patching.record import record_path
from megatron_r3.patching.series import GROUPS, read_series
from megatron_r3.patching.tree import TreeState, identify
from megatron_r3.patching.versions import patches_folder, read_versions

NUMBERS = {"0001": "0001", "0002": "0101", "0003": "0301", "0004": "0201"}
PLACES = {SCHEDULE: "step():", OLD: "echo old", README: "# MoE", DISPATCHER: "def preprocess"}


@pytest.fixture
def grouped(upstream):
    """Its patches in four groups; the router is changed by two of them."""
    for file in upstream.series:
        file.rename(file.with_name(NUMBERS[file.name[:4]] + file.name[4:]))
    return upstream


def edited(tree, path):
    """One line of context is another one."""
    text = (tree / path).read_text()
    assert text.count(PLACES[path]) == 1
    (tree / path).write_text(text.replace(PLACES[path], f"{PLACES[path]}  # mine"))
    commit(tree, f"Edit {path}")


def status_of(upstream):
    return run_cli("status", upstream.checkout, "--patches", upstream.patches).stdout


def test_a_release_takes_all(grouped):
    change = apply_series(grouped.checkout, grouped.patches)
    assert change.status.groups == ("r3", "guests", "engine", "rl")
    assert change.status.unreleased is None
    assert "\ngroups: r3, guests, engine, rl\n" in status_of(grouped)


@pytest.mark.parametrize(
    ("path", "groups", "left_out"),
    [
        (SCHEDULE, "r3, engine, rl", [f"guests: {SCHEDULE}"]),
        (OLD, "r3, guests, engine", [f"rl: {OLD}"]),
        (README, "r3, guests", [f"engine: {README}", "rl: it needs engine"]),
    ],
)
def test_a_group_that_does_not_fit_is_left_out_by_name(grouped, path, groups, left_out):
    tree, patches = grouped.checkout, grouped.patches
    edited(tree, path)
    before = snapshot(tree)
    with refused(tree, "--unreleased", *(f"left out: {one}" for one in left_out)):
        apply_series(tree, patches)
    done = run_cli("apply", tree, "--patches", patches, "--unreleased").stdout
    assert all(f"left out: {one}" in done for one in left_out)
    rest = ", ".join(g for g in ("r3", "guests", "engine", "rl") if g not in groups.split(", "))
    assert f"\ngroups: {groups}; left out: {rest}\n" in status_of(grouped)
    assert path not in identify(tree, read_versions(patches)).patched
    assert revert_series(tree, patches).status.state is TreeState.PRISTINE
    assert snapshot(tree) == before
    assert not record_path(tree).exists()


def test_a_tree_to_which_r3_does_not_fit_is_refused(grouped):
    edited(grouped.checkout, DISPATCHER)
    for unreleased in (False, True):
        with refused(grouped.checkout, "patch 1 of 4 does not apply", DISPATCHER):
            apply_series(grouped.checkout, grouped.patches, unreleased=unreleased)
    assert not record_path(grouped.checkout).exists()


@pytest.mark.parametrize("asked", [["r3"], ["r3", "guests"], ["engine"], ["rl", "engine", "r3"]])
def test_some_groups_of_a_release(grouped, asked):
    tree, patches = grouped.checkout, grouped.patches
    before = snapshot(tree)
    change = apply_series(tree, patches, groups=asked)
    assert {*change.status.groups} == {*asked}
    text = (tree / ROUTER).read_text()
    assert ("hook = None" in text, "bind(hook)" in text) == ("r3" in asked, "guests" in asked)
    assert (tree / NEW).exists() == ("rl" in asked)
    assert apply_series(tree, patches).files == ()  # they are in
    assert identify(tree, read_versions(patches)).state is TreeState.APPLIED
    revert_series(tree, patches)
    assert snapshot(tree) == before
    assert not record_path(tree).exists()
    assert TAG in status_of(grouped)


def test_all_groups_of_a_release_are_the_release(grouped):
    asked = ["rl", "engine", "guests", "r3"]
    change = apply_series(grouped.checkout, grouped.patches, groups=asked)
    assert change.status.unreleased is None
    assert not record_path(grouped.checkout).exists()


def test_a_package_takes_some_groups(grouped):
    """It is no checkout, lacks a file, and has another base of one that two patches change."""
    before = snapshot(grouped.package)
    change = apply_series(grouped.package, grouped.patches, groups=["r3", "guests", "engine"])
    assert change.status.groups == ("r3", "guests", "engine")
    assert change.status.absent == (README,)
    revert_series(grouped.package, grouped.patches)
    assert snapshot(grouped.package) == before


def test_groups_that_cannot_be_asked_for(grouped):
    tree, patches = grouped.checkout, grouped.patches
    with refused(
        tree, "--groups made-up: there is no such group; groups are r3, guests, engine, rl, fixes"
    ):
        apply_series(tree, patches, groups=["made-up"])
    with refused(tree, "--groups: rl needs r3, engine: give these too"):
        apply_series(tree, patches, groups=["rl"])
    with refused(tree, "the groups fixes do not all apply to it: make status"):
        apply_series(tree, patches, groups=["fixes"])  # this line has none
    apply_series(tree, patches, groups=["r3"])
    with refused(tree, "is patched with r3, not with r3, guests: revert the tree first"):
        apply_series(tree, patches, groups=["r3", "guests"])


def test_a_number_beyond_all_groups_is_refused(grouped):
    last = grouped.series[-1]
    last.rename(last.with_name(f"{100 * len(GROUPS):04d}{last.name[4:]}"))
    with pytest.raises(PatchingError, match="no group has the numbers from 0500 on"):
        read_series(grouped.patches / LINE)


def test_the_real_groups_have_what_they_need_before_them():
    names = [group.name for group in GROUPS]
    for place, group in enumerate(GROUPS):
        assert {*group.needs} <= {*names[:place]}
    for line in read_versions(patches_folder()).lines:
        groups = read_series(line.folder).groups
        assert groups[0] == "r3"
        assert all({*group.needs} <= {*groups} for group in GROUPS if group.name in groups)
    page = (patches_folder().parent / "docs" / "how-it-works.md").read_text()
    rows = re.findall(r"^\| (\w+) \| \d+ (?:to|on)[^|]*\| ([^|]*)\|", page, re.MULTILINE)
    assert rows == [(group.name, f"{', '.join(group.needs)} ".lstrip()) for group in GROUPS]
