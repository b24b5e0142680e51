"""What apply and revert refuse: the message names the file, and the tree is as it was."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from patching_upstream import (
    DISPATCHER,
    FILES,
    LINE,
    NEW,
    README,
    ROUTER,
    SCHEDULE,
    TAG,
    git,
    refused,
    snapshot,
    write,
)

from megatron_r3.patching.apply import apply_series, revert_series
from megatron_r3.patching.tree import TreeState, identify
from megatron_r3.patching.tree_files import locked
from megatron_r3.patching.versions import read_versions


def edit(tree, path, old, new):
    text = (tree / path).read_text()
    assert old in text
    (tree / path).write_text(text.replace(old, new))


def crlf(tree, *paths):
    for path in paths:
        (tree / path).write_bytes((tree / path).read_bytes().replace(b"\n", b"\r\n"))


def in_place_of(tree, path, make):
    (tree / path).unlink()
    make(tree / path)


# what happens to a tree, and what apply says then; revert names the file too
TREES = {
    "a line of context": (
        lambda tree: edit(tree, DISPATCHER, "splits", "pieces"),
        ["patch 1 of 4 does not apply: 0001-", f"at: {DISPATCHER}:1", "subject: Ask the hook"],
        DISPATCHER,
    ),
    "a line where the patches fit by luck": (
        lambda tree: edit(tree, ROUTER, "line 20\n", "mine\n"),
        [f"differ:\n  {ROUTER}\n", "was never tested", "--unreleased"],
        ROUTER,
    ),
    "a file that is gone": (
        lambda tree: (tree / ROUTER).unlink(),
        ["patch 1 of 4", f"at: {ROUTER}: no such file"],
        f"{ROUTER}: missing; if git left it out of the checkout: git sparse-checkout disable",
    ),
    "a file that the patches add": (
        lambda tree: write(tree, NEW, "mine\n"),
        ["patch 3 of 4", f"at: {NEW}: already there"],
        NEW,
    ),
    "a file that the package lacks": (
        lambda tree: write(tree, README, "mine\n"),
        [f"{README}: 9.1.1 has no such file"],
        README,
    ),
    "another version altogether": (
        lambda tree: [write(tree, path, "x\n") for path in FILES if (tree / path).exists()],
        ["is no tree of a known release line", f"{LINE}: {TAG}, 9.1.1", f"\n  {ROUTER}: "],
        ROUTER,
    ),
    "CRLF": (
        lambda tree: crlf(tree, *(path for path in FILES if (tree / path).exists())),
        [f"{ROUTER}: neither the base nor the patched file: it has CRLF line ends"],
        ROUTER,
    ),
    "a pipe, which would wait for ever": (
        lambda tree: in_place_of(tree, ROUTER, os.mkfifo),
        [f"{ROUTER} is not a plain file"],
        ROUTER,
    ),
    "a folder": (
        lambda tree: in_place_of(tree, ROUTER, os.mkdir),
        [f"{ROUTER} is not a plain file"],
        ROUTER,
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_a_file_that_is_not_as_it_should_be(upstream, name):
    happens, words, where = TREES[name]
    happens(upstream.package)
    with refused(upstream.package, *words):
        apply_series(upstream.package, upstream.patches)
    with refused(upstream.package, where):
        revert_series(upstream.package, upstream.patches)


def test_the_next_command_of_a_patch_that_fails_helps(upstream):
    tree = upstream.checkout
    edit(tree, ROUTER, "line 31\n", "mine\n")
    base = git("rev-parse", TAG, cwd=tree).strip()
    with refused(tree, "patch 2 of 4", f"{ROUTER}:29", f"next: git -C {tree} checkout {base}"):
        apply_series(tree, upstream.patches)
    git("checkout", "--quiet", "--force", base, cwd=tree)
    apply_series(tree, upstream.patches)
    edit(upstream.package, ROUTER, "line 31\n", "mine\n")
    with refused(upstream.package, "next: megatron-r3 megatron"):
        apply_series(upstream.package, upstream.patches)


def test_asked_for_the_line_it_says_where_another_version_differs(upstream):
    for path in (ROUTER, DISPATCHER, SCHEDULE):
        write(upstream.package, path, "x\n")
    with refused(upstream.package, "patch 1 of 4", DISPATCHER):
        apply_series(upstream.package, upstream.patches, line=LINE)


def test_revert_of_an_edited_file(upstream):
    apply_series(upstream.package, upstream.patches)
    edit(upstream.package, ROUTER, "line 20\n", "mine\n")
    for move in (apply_series, revert_series):
        with refused(upstream.package, ROUTER, "neither the base nor the patched file"):
            move(upstream.package, upstream.patches)


def test_a_sparse_checkout_is_mended_by_what_the_message_says(upstream):
    tree = upstream.checkout
    git("status", cwd=tree)  # git leaves out only files that its index knows to be unchanged
    git("sparse-checkout", "set", "--cone", "megatron/core/empty", cwd=tree)
    with refused(tree, ROUTER, "no such file"):
        apply_series(tree, upstream.patches)
    git("sparse-checkout", "disable", cwd=tree)
    apply_series(tree, upstream.patches)


@pytest.mark.parametrize("path", [ROUTER, "megatron/core/transformer"])
def test_symlinks(upstream, tmp_path, path):
    (upstream.package / path).rename(tmp_path / "elsewhere")
    (upstream.package / path).symlink_to(tmp_path / "elsewhere")
    outside = snapshot(tmp_path)
    with refused(upstream.package, path, "symlink"):
        apply_series(upstream.package, upstream.patches)
    assert snapshot(tmp_path) == outside


@pytest.mark.parametrize("below", ["megatron", "nowhere", f"{ROUTER}"])
def test_no_megatron_tree(upstream, below):
    with refused(upstream.package, str(upstream.package / below)):
        apply_series(upstream.package / below, upstream.patches)


def test_an_unknown_line(upstream):
    with refused(upstream.package, "core_r1", LINE):
        apply_series(upstream.package, upstream.patches, line="core_r1")


def test_two_at_once_wait_for_each_other(upstream):
    with ThreadPoolExecutor() as pool:
        with locked(upstream.package):
            second = pool.submit(apply_series, upstream.package, upstream.patches)
            with pytest.raises(TimeoutError):
                second.result(timeout=0.5)
        assert second.result(timeout=60).before is TreeState.PRISTINE


# -- patches that are damaged


@pytest.mark.parametrize(
    ("place", "old", "new", "words"),
    [
        (1, b" line 29\n", b" line 92\n", ["patch 2 of 4", f"{ROUTER}:", "checkout -- ."]),
        (0, b"+hook = None", b"+hook = True", ["0001-", ROUTER, "damaged"]),
    ],
)
def test_a_patch_that_was_edited(upstream, place, old, new, words):
    patch = upstream.series[place]
    assert old in patch.read_bytes()
    patch.write_bytes(patch.read_bytes().replace(old, new))
    with refused(upstream.checkout, *words):
        apply_series(upstream.checkout, upstream.patches)
    assert identify(upstream.checkout, read_versions(upstream.patches)).state is TreeState.PRISTINE


def test_a_patch_that_does_not_give_what_versions_toml_promises(upstream):
    """The package has another base of this file, so the ids in the patch do not tell."""
    patch = upstream.series[1]
    patch.write_bytes(patch.read_bytes().replace(b"+    return bind", b"+    return bound"))
    with refused(upstream.package, SCHEDULE, "the patches of core_r9.1.0 are damaged", "9.1.1"):
        apply_series(upstream.package, upstream.patches)


def test_a_patch_that_is_cut_or_garbage(upstream):
    first, *_, last = upstream.series
    whole = last.read_bytes()
    last.write_bytes(b"\xff\x00 not a patch\n" * 10)
    for move in (apply_series, revert_series):
        with refused(upstream.checkout, last.name, "git format-patch"):
            move(upstream.checkout, upstream.patches)
    last.write_bytes(whole)
    first.write_bytes(first.read_bytes()[:-40])
    with refused(upstream.checkout, first.name, "corrupt patch"):
        apply_series(upstream.checkout, upstream.patches)


def test_only_the_known_absent_files_may_be_absent(upstream):
    versions = upstream.patches / "versions.toml"
    versions.write_text(versions.read_text().replace(f'absent = ["{README}"]', "absent = []"))
    with refused(upstream.package, README, "no such file"):
        apply_series(upstream.package, upstream.patches)
