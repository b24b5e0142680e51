"""What apply and revert refuse: the message names the file, and the tree is as it was."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from patching_upstream import (
    DISPATCHER,
    LINE,
    NEW,
    OTHER,
    README,
    ROUTER,
    TAG,
    commit,
    git,
    refused,
    snapshot,
    write,
)

from megatron_r3.patching.apply import apply_series, revert_series
from megatron_r3.patching.git import PatchingError
from megatron_r3.patching.tree import TreeState, identify
from megatron_r3.patching.versions import read_versions
from megatron_r3.patching.write import locked


def edit(tree, path, old, new):
    text = (tree / path).read_text()
    assert old in text
    (tree / path).write_text(text.replace(old, new))


def test_a_file_that_upstream_changed_gives_five_lines(upstream):
    tree = upstream.checkout
    for i in range(4):
        edit(tree, ROUTER, "line 29\n", f"upstream {i}\nline 29\n")
        commit(tree, f"Change the router {i}")
    edit(tree, ROUTER, "line 30\n", "thirty\n")
    commit(tree, "Rename thirty")
    with pytest.raises(PatchingError) as error:
        apply_series(tree, upstream.patches)
    lines = str(error.value).splitlines()
    base = git("rev-parse", TAG, cwd=tree).strip()
    assert lines[0] == "patch 2 of 4 does not apply: 0002-Bind-the-hook-to-the-microbatch.patch"
    assert lines[1].startswith(f"  at: {ROUTER}:")
    assert lines[2] == "  subject: Bind the hook to the microbatch"
    assert lines[3].startswith("  upstream commits: ")
    assert "Rename thirty; " in lines[3]
    assert "Change the router 3; " in lines[3]
    assert lines[3].endswith(f"Change the router 2 and 2 more since {TAG}")
    assert lines[4] == f"  next: git -C {tree} checkout {base}  # {TAG}"
    assert len(lines) == 5
    with refused(tree, ROUTER):
        apply_series(tree, upstream.patches)
    git("checkout", "--quiet", base, cwd=tree)  # what the message says to do
    apply_series(tree, upstream.patches)


def test_five_lines_outside_git(upstream):
    edit(upstream.package, DISPATCHER, "splits", "pieces")
    with refused(
        upstream.package,
        "patch 1 of 4",
        f"{DISPATCHER}:1",
        "unknown: not a git checkout",
        "next: megatron-r3 megatron",
    ):
        apply_series(upstream.package, upstream.patches)


def test_five_lines_in_a_checkout_without_the_known_commit(upstream):
    edit(upstream.package, DISPATCHER, "splits", "pieces")
    git("init", "--quiet", cwd=upstream.package)
    commit(upstream.package, "As it is")
    with refused(upstream.package, DISPATCHER, f"the checkout does not hold {TAG}"):
        apply_series(upstream.package, upstream.patches)


def test_another_version_altogether(upstream):
    for path in upstream.package.rglob("*.*"):
        if path.is_file():
            path.write_text("another version\n")
    with refused(upstream.package, "no tree of a known release line", LINE, TAG, ROUTER):
        apply_series(upstream.package, upstream.patches)
    with refused(upstream.package, ROUTER):
        revert_series(upstream.package, upstream.patches)
    with refused(upstream.package, "patch 1 of 4", DISPATCHER):  # asked for the line, it says where
        apply_series(upstream.package, upstream.patches, line=LINE)


@pytest.mark.parametrize("name", ["checkout", "package"])
def test_a_file_where_the_patches_fit_by_luck(upstream, name):
    tree = getattr(upstream, name)
    edit(tree, ROUTER, "line 20\n", "mine\n")
    with refused(tree, ROUTER):
        apply_series(tree, upstream.patches)
    assert identify(tree, read_versions(upstream.patches)).unknown == [ROUTER]
    edit(tree, ROUTER, "mine\n", "line 20\n")
    apply_series(tree, upstream.patches)


def test_revert_of_an_edited_file(upstream):
    apply_series(upstream.package, upstream.patches)
    edit(upstream.package, ROUTER, "line 20\n", "mine\n")
    for move in (apply_series, revert_series):
        with refused(upstream.package, ROUTER, "neither the base nor the patched file"):
            move(upstream.package, upstream.patches)


def test_a_deleted_file(upstream):
    (upstream.package / ROUTER).unlink()
    with refused(upstream.package, ROUTER, "no such file"):
        apply_series(upstream.package, upstream.patches)
    with refused(upstream.package, ROUTER, "missing"):
        revert_series(upstream.package, upstream.patches)


def test_a_file_that_the_patches_add_is_there_already(upstream):
    write(upstream.package, NEW, "mine\n")
    with refused(upstream.package, NEW, "already there"):
        apply_series(upstream.package, upstream.patches)


def test_a_file_that_the_tree_is_known_to_lack_is_there(upstream):
    write(upstream.package, README, "mine\n")
    with refused(upstream.package, README):
        apply_series(upstream.package, upstream.patches)


def test_only_the_known_absent_files_may_be_absent(upstream):
    versions = upstream.patches / "versions.toml"
    versions.write_text(versions.read_text().replace(f'absent = ["{README}"]', "absent = []"))
    with refused(upstream.package, README, "no such file"):
        apply_series(upstream.package, upstream.patches)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("path", [OTHER, ROUTER])
def test_uncommitted_changes(upstream, path, staged):
    write(upstream.checkout, path, "mine\n")
    if staged:
        git("add", path, cwd=upstream.checkout)
    with refused(upstream.checkout, path, "commit or stash"):
        apply_series(upstream.checkout, upstream.patches)
    git("stash", "--quiet", cwd=upstream.checkout)
    apply_series(upstream.checkout, upstream.patches)


def test_a_deleted_tracked_file(upstream):
    (upstream.checkout / README).unlink()  # not the package, which is known to lack it
    with refused(upstream.checkout, README, "uncommitted"):
        apply_series(upstream.checkout, upstream.patches)


def test_crlf_line_ends(upstream):
    for path in upstream.package.rglob("*.*"):
        if path.is_file():
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    with refused(upstream.package, ROUTER, "CRLF"):
        apply_series(upstream.package, upstream.patches)


@pytest.mark.parametrize("path", [ROUTER, "megatron/core/transformer"])
def test_symlinks(upstream, tmp_path, path):
    (upstream.package / path).rename(tmp_path / "elsewhere")
    (upstream.package / path).symlink_to(tmp_path / "elsewhere")
    outside = snapshot(tmp_path)
    with refused(upstream.package, path, "symlink"):
        apply_series(upstream.package, upstream.patches)
    assert snapshot(tmp_path) == outside


def test_a_folder_or_a_pipe_in_place_of_a_file(upstream):
    (upstream.package / ROUTER).unlink()
    os.mkfifo(upstream.package / ROUTER)  # reading it would wait for ever
    with refused(upstream.package, ROUTER, "not a plain file"):
        apply_series(upstream.package, upstream.patches)
    (upstream.package / ROUTER).unlink()
    (upstream.package / ROUTER).mkdir()
    with refused(upstream.package, ROUTER, "not a plain file"):
        apply_series(upstream.package, upstream.patches)


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


def test_a_patch_that_does_not_fit_its_own_base(upstream):
    patch = upstream.series[1]
    patch.write_bytes(patch.read_bytes().replace(b" line 29\n", b" line 92\n"))
    with refused(
        upstream.checkout, "patch 2 of 4", f"{ROUTER}:", f"-C {upstream.patches / LINE} checkout"
    ):
        apply_series(upstream.checkout, upstream.patches)
    assert identify(upstream.checkout, read_versions(upstream.patches)).state is TreeState.PRISTINE


def test_a_patch_that_fits_but_was_edited(upstream):
    patch = upstream.series[0]
    patch.write_bytes(patch.read_bytes().replace(b"+hook = None", b"+hook = True"))
    with refused(upstream.checkout, patch.name, ROUTER, "damaged"):
        apply_series(upstream.checkout, upstream.patches)


def test_a_patch_that_is_cut(upstream):
    patch = upstream.series[0]
    patch.write_bytes(patch.read_bytes()[:-40])
    with refused(upstream.checkout, patch.name, "corrupt patch"):
        apply_series(upstream.checkout, upstream.patches)


def test_a_garbage_patch(upstream):
    patch = upstream.series[2]
    patch.write_bytes(b"\xff\x00 not a patch\n" * 10)
    for move in (apply_series, revert_series):
        with refused(upstream.checkout, patch.name, "git format-patch"):
            move(upstream.checkout, upstream.patches)
