"""Applying and reverting a series on a tiny upstream: what works, and stays as it was."""

import os
import subprocess

import pytest
from patching_hostile import hostile
from patching_upstream import (
    DISPATCHER,
    FILES,
    LINE,
    NEW,
    OLD,
    OTHER,
    PACKAGE,
    README,
    ROUTER,
    SCHEDULE,
    TAG,
    clone,
    commit,
    git,
    snapshot,
    write,
)

from megatron_r3.patching.apply import apply_series, revert_series
from megatron_r3.patching.tree import TreeState, identify
from megatron_r3.patching.versions import read_versions


def state(tree, upstream):
    return identify(tree, read_versions(upstream.patches)).state


def test_apply_gives_what_git_am_gives(upstream, tmp_path):
    clone(upstream.checkout, tmp_path / "am")
    git("am", "--quiet", *map(str, upstream.series), cwd=tmp_path / "am")
    change = apply_series(upstream.checkout, upstream.patches)
    assert change.before is TreeState.PRISTINE
    assert change.status.state is TreeState.APPLIED
    assert sorted(change.files) == sorted(FILES)
    assert change.status.names == (TAG,)
    assert snapshot(upstream.checkout) == snapshot(tmp_path / "am")


@pytest.mark.parametrize("move", [apply_series, revert_series])
def test_what_is_done_already_touches_nothing(upstream, move):
    apply_series(upstream.checkout, upstream.patches)
    move(upstream.checkout, upstream.patches)
    before = snapshot(upstream.checkout, mtimes=True)
    assert move(upstream.checkout, upstream.patches).files == ()
    assert snapshot(upstream.checkout, mtimes=True) == before


@pytest.mark.parametrize("name", ["checkout", "package"])
def test_revert_gives_back_every_byte_and_mode(upstream, name):
    tree = getattr(upstream, name)
    (tree / ROUTER).chmod(0o640)
    before = snapshot(tree)
    apply_series(tree, upstream.patches)
    assert (tree / NEW).stat().st_mode & 0o111
    assert not (tree / OLD).exists()
    assert (tree / ROUTER).stat().st_mode & 0o777 == 0o640
    assert (tree / DISPATCHER).stat().st_mode & 0o777 == 0o755
    change = revert_series(tree, upstream.patches)
    assert change.status.state is TreeState.PRISTINE
    assert snapshot(tree) == before
    assert not (tree / NEW).parent.exists()


def test_a_folder_that_is_not_empty_stays(upstream):
    apply_series(upstream.package, upstream.patches)
    write(upstream.package, f"{NEW}.log", "mine\n")
    revert_series(upstream.package, upstream.patches)
    assert (upstream.package / f"{NEW}.log").read_text() == "mine\n"


def test_a_known_absent_file_is_skipped_and_another_base_is_known(upstream):
    change = apply_series(upstream.package, upstream.patches)
    assert change.status.names == (PACKAGE,)
    assert change.status.tree.absent == (README,)
    assert README not in change.files
    assert not (upstream.package / README).exists()
    text = (upstream.package / SCHEDULE).read_text()
    assert "9.1.1" in text
    assert "bind(forward)()" in text


def test_a_tree_inside_another_repository(upstream):
    """Plain `git apply` below another repository's work tree exits 0 and changes nothing."""
    outer = upstream.package.parent
    git("init", "--quiet", cwd=outer)
    write(outer, "mine.py", "1\n")
    git("add", "mine.py", cwd=outer)
    git("commit", "--quiet", "-m", "mine", cwd=outer)
    write(outer, "mine.py", "2\n")  # the outer repository's changes are not the tree's
    assert (
        "Skipped patch"
        in subprocess.run(
            ["git", "apply", "-v", *map(str, upstream.series[:1])],
            cwd=upstream.package,
            text=True,
            capture_output=True,
        ).stderr
    )
    apply_series(upstream.package, upstream.patches)
    assert state(upstream.package, upstream) is TreeState.APPLIED


def test_the_users_git_configuration_changes_nothing(upstream, tmp_path, monkeypatch):
    hostile(tmp_path, monkeypatch, upstream.checkout)
    # the negative control: git without the pins meets this configuration and refuses
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    plain = ["git", "apply", "--check", str(upstream.series[0])]
    assert subprocess.run(plain, cwd=upstream.checkout, env=env).returncode != 0
    before = snapshot(upstream.checkout)
    apply_series(upstream.checkout, upstream.patches)
    assert b"hook = None   \n" in (upstream.checkout / ROUTER).read_bytes()
    revert_series(upstream.checkout, upstream.patches)
    assert snapshot(upstream.checkout) == before


@pytest.mark.parametrize("name", ["with spaces", "with:colon", "ümlaut '$x\""])
def test_any_path(upstream, name):
    for tree in (upstream.checkout, upstream.package):
        moved = tree.rename(tree.parent / f"{tree.name} {name}")
        before = snapshot(moved)
        apply_series(moved, upstream.patches)
        revert_series(moved, upstream.patches)
        assert snapshot(moved) == before


def test_a_relative_path_and_a_link_to_the_tree(upstream, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to("package")
    monkeypatch.chdir(tmp_path)
    apply_series(tmp_path.relative_to(tmp_path) / "link", upstream.patches.relative_to(tmp_path))
    assert state(upstream.package, upstream) is TreeState.APPLIED


def test_a_copy_without_the_repository_that_its_git_file_names(upstream):
    """As a submodule or a worktree that was copied into an image: a tree, but no checkout."""
    write(upstream.package, ".git", "gitdir: ../nowhere\n")
    apply_series(upstream.package, upstream.patches)
    assert state(upstream.package, upstream) is TreeState.APPLIED


def test_a_hard_link_is_cut(upstream, tmp_path):
    """Package installers link one file into many environments."""
    (tmp_path / "elsewhere.py").hardlink_to(upstream.package / ROUTER)
    before = (tmp_path / "elsewhere.py").read_bytes()
    apply_series(upstream.package, upstream.patches)
    assert (tmp_path / "elsewhere.py").read_bytes() == before


def test_applied_and_committed_is_applied(upstream):
    before = snapshot(upstream.checkout)
    apply_series(upstream.checkout, upstream.patches)
    commit(upstream.checkout, "The patches")
    assert apply_series(upstream.checkout, upstream.patches).files == ()
    revert_series(upstream.checkout, upstream.patches)
    assert snapshot(upstream.checkout) == before


def test_the_first_patches_by_hand_are_half_applied(upstream):
    before = snapshot(upstream.checkout)
    git("am", "--quiet", *map(str, upstream.series[:1]), cwd=upstream.checkout)
    assert state(upstream.checkout, upstream) is TreeState.HALF_APPLIED
    apply_series(upstream.checkout, upstream.patches)
    assert state(upstream.checkout, upstream) is TreeState.APPLIED
    revert_series(upstream.checkout, upstream.patches)
    assert snapshot(upstream.checkout) == before


def test_status_writes_nothing_even_into_git(upstream):
    (upstream.checkout / OTHER).touch()  # git would note the new time in its index
    index = (upstream.checkout / ".git/index").read_bytes()
    before = snapshot(upstream.checkout, mtimes=True)
    state(upstream.checkout, upstream)
    assert snapshot(upstream.checkout, mtimes=True) == before
    before = snapshot(upstream.checkout)
    apply_series(upstream.checkout, upstream.patches)
    assert (upstream.checkout / ".git/index").read_bytes() == index
    revert_series(upstream.checkout, upstream.patches)
    assert (upstream.checkout / ".git/index").read_bytes() == index
    assert snapshot(upstream.checkout) == before  # every byte and mode


def test_other_files_are_not_looked_at(upstream):
    """Uncommitted changes in files of no patch, staged or not, stay as they are."""
    tree = upstream.checkout
    write(tree, OTHER, "other = 2\n")
    write(tree, "data/mine.bin", "mine\n")
    git("add", OTHER, cwd=tree)
    before = snapshot(tree)
    apply_series(tree, upstream.patches, line=LINE)
    assert state(tree, upstream) is TreeState.APPLIED
    revert_series(tree, upstream.patches)
    assert snapshot(tree) == before
