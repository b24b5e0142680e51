"""Trees between releases: taken by a word alone, recorded, reverted to the byte, else refused."""

import errno
import os
import signal

import pytest
from patching_upstream import (
    DISPATCHER,
    KILLED,
    LINE,
    NEW,
    OTHER,
    README,
    ROUTER,
    SCHEDULE,
    TAG,
    add_line,
    clone,
    commit,
    git,
    refused,
    run_cli,
    snapshot,
    write,
)

from megatron_r3.cli import main
from megatron_r3.patching.apply import apply_series, revert_series
from megatron_r3.patching.git import PatchingError
from megatron_r3.patching.record import (
    CheckedOn,
    Record,
    files_digest,
    read_record,
    record_path,
    write_record,
)
from megatron_r3.patching.tree import TreeState, identify
from megatron_r3.patching.versions import read_versions

DOT = ".megatron-r3.json"


def edit(tree, path, old, new):
    text = (tree / path).read_text()
    assert old in text
    (tree / path).write_text(text.replace(old, new))


def state(tree, upstream):
    return identify(tree, read_versions(upstream.patches)).state


@pytest.fixture
def between(upstream):
    """The checkout at a commit after its release, where the patches fit in other places."""
    edit(upstream.checkout, ROUTER, "line 1\n", "new\nline 1\n")
    edit(upstream.checkout, ROUTER, "line 20\n", "line twenty\n")
    upstream.commit = commit(upstream.checkout, "Between releases")
    return upstream


@pytest.fixture
def package(upstream):
    """The package, which is no checkout, with a router of its own."""
    edit(upstream.package, ROUTER, "line 20\n", "line twenty\n")
    return upstream


def status_of(upstream):
    return run_cli("status", upstream.checkout, "--patches", upstream.patches).stdout


def take(tree, upstream, **options):
    return apply_series(tree, upstream.patches, unreleased=True, **options)


def test_without_the_word_it_is_refused_and_the_word_is_named(between):
    with refused(between.checkout, ROUTER, "--unreleased", "UNRELEASED=1", TAG, LINE, "1 of its 6"):
        apply_series(between.checkout, between.patches)
    assert not record_path(between.checkout).exists()


def test_one_changed_line_of_context_is_refused_with_the_word_too(between):
    edit(between.checkout, ROUTER, "line 31\n", "line thirty-one\n")
    commit(between.checkout, "Change a neighbour")
    for unreleased in (False, True):
        with refused(between.checkout, "patch 2 of 4 does not apply", ROUTER):
            apply_series(between.checkout, between.patches, unreleased=unreleased)
    assert "--unreleased" not in status_of(between)
    assert not record_path(between.checkout).exists()


def test_apply_gives_what_git_am_gives_and_revert_every_byte(between, tmp_path):
    tree = between.checkout
    clone(tree, tmp_path / "am")
    git("am", "--quiet", *map(str, between.series), cwd=tmp_path / "am")
    before = snapshot(tree)
    change = take(tree, between)
    assert (change.before, change.status.state) == (TreeState.PRISTINE, TreeState.APPLIED)
    assert snapshot(tree) == snapshot(tmp_path / "am")
    recorded = change.status.unreleased
    assert (recorded.line, recorded.near, recorded.differ) == (LINE, TAG, (ROUTER,))
    assert recorded.commit == between.commit
    assert apply_series(tree, between.patches).files == ()  # applied: no word is needed any more
    assert revert_series(tree, between.patches).status.state is TreeState.PRISTINE
    assert snapshot(tree) == before
    assert not record_path(tree).exists()
    assert state(tree, between) is TreeState.UNKNOWN


def test_a_package_has_its_record_at_its_top(package):
    before = snapshot(package.package)
    take(package.package, package)
    assert (package.package / DOT).is_file()
    assert state(package.package, package) is TreeState.APPLIED
    revert_series(package.package, package.patches)
    assert snapshot(package.package) == before  # the record is gone too


def test_git_does_not_see_the_record(between):
    take(between.checkout, between)
    commit(between.checkout, "The patches")  # with git add --all
    git("clean", "-fdxq", cwd=between.checkout)
    assert state(between.checkout, between) is TreeState.APPLIED
    assert git("status", "--porcelain", cwd=between.checkout) == ""


def test_each_work_tree_has_its_own_record(between, tmp_path):
    second = clone(between.checkout, tmp_path / "second", "worktree")
    take(second, between)
    assert state(second, between) is TreeState.APPLIED
    assert state(between.checkout, between) is TreeState.UNKNOWN
    assert not record_path(between.checkout).exists()


def test_a_release_is_taken_as_a_release(upstream):
    change = take(upstream.checkout, upstream)
    assert change.status.unreleased is None
    assert not record_path(upstream.checkout).exists()


def test_uncommitted_changes_are_refused_with_the_word_too(upstream):
    edit(upstream.checkout, ROUTER, "line 20\n", "mine\n")
    with refused(upstream.checkout, ROUTER, "commit or stash"):
        take(upstream.checkout, upstream)


def test_patches_that_git_would_take_off_elsewhere_are_refused(upstream):
    """Near the place of a hunk the tree already has what the hunk makes of another place."""
    same = "".join(f"line {i}\n" for i in range(7, 11)) + "hook = None   \n"
    same += "".join(f"line {i}\n" for i in range(11, 15))
    text, far = (upstream.package / ROUTER).read_text(), "y\n" * 20
    write(upstream.package, ROUTER, f"x\n{same}{far}{text}")
    with refused(upstream.package, ROUTER):
        take(upstream.package, upstream)
    # the control: where that text is farther away than the right place, all is well
    write(upstream.package, ROUTER, f"{text}{far}{same}")
    take(upstream.package, upstream)


# -- killed, or not able to write


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("killed", ["apply", "revert"])
@pytest.mark.parametrize("then", [apply_series, revert_series])
def test_killed_between_two_files(between, n, killed, then):
    tree, patches = between.checkout, between.patches
    pristine = snapshot(tree)
    take(tree, between)
    applied = snapshot(tree)
    if killed == "apply":
        revert_series(tree, patches)
    word = ("--unreleased",) if killed == "apply" else ()
    done = run_cli(killed, tree, "--patches", patches, *word, prelude=KILLED.format(n=n))
    assert done.returncode == -signal.SIGKILL, done.stderr
    untouched = TreeState.PRISTINE if killed == "apply" else TreeState.APPLIED
    assert state(tree, between) is (TreeState.HALF_APPLIED if n else untouched)
    then(tree, patches)  # the word was said already
    assert snapshot(tree) == (applied if then is apply_series else pristine)
    assert record_path(tree).exists() == (then is apply_series)


def test_a_rename_that_fails_leaves_no_record(package, monkeypatch):
    real, calls = os.replace, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 3:  # the record, a file, and then this one
            raise OSError(errno.EACCES, "Permission denied")
        real(*args)

    before = snapshot(package.package)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing)
        with pytest.raises(PatchingError, match="nothing was changed"):
            take(package.package, package)
    assert snapshot(package.package) == before


def test_a_record_that_cannot_be_written(package):
    (package.package / f"{DOT}-new").mkdir()
    with refused(package.package, f"cannot write {package.package / DOT}"):
        take(package.package, package)


# -- records that are not what was written


def damage(path, how):
    text = path.read_text()
    path.unlink()
    if how == "cut":
        path.write_text(text[:-40])
    elif how == "edited":
        path.write_text(text.replace(f'"{LINE}"', '"core_r9.9.9"'))
    elif how == "other json":
        path.write_text('{"format": 2, "tree": []}')
    elif how == "newer":
        path.write_text(text.replace('"format": 2', '"format": 3'))
    elif how == "bytes":
        path.write_bytes(b"\xff\x00" * 9)
    elif how == "deep":
        path.write_text("[" * 100_000)
    elif how == "a link":
        path.with_name("elsewhere").write_text(text)
        path.symlink_to("elsewhere")
    elif how == "a pipe":
        os.mkfifo(path)
    elif how == "a folder":
        path.mkdir()


DAMAGES = "cut, edited, other json, newer, bytes, deep, a link, a pipe, a folder".split(", ")


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_record_is_one_error(between, how, capsys):
    take(between.checkout, between)
    path = record_path(between.checkout)
    damage(path, how)
    before = snapshot(between.checkout, mtimes=True)
    for command in ("status", "apply", "revert"):
        assert main([command, str(between.checkout), "--patches", str(between.patches)]) == 1
        told = capsys.readouterr().err
        assert told.startswith(f"error: {path} does not say how the tree was patched")
        assert len(told.splitlines()) == 1
    assert snapshot(between.checkout, mtimes=True) == before


def test_files_that_changed_since_are_named(package):
    take(package.package, package)
    edit(package.package, ROUTER, "line 5\n", "mine\n")
    for move in (apply_series, revert_series):
        with refused(package.package, "has changed since", DOT, ROUTER):
            move(package.package, package.patches)
    edit(package.package, ROUTER, "mine\n", "line 5\n")
    revert_series(package.package, package.patches)


def test_a_tree_that_moved_on_needs_the_word_again(between):
    tree = between.checkout
    take(tree, between)
    git("reset", "--quiet", "--hard", cwd=tree)
    git("clean", "-fdxq", cwd=tree)  # the file that the patches add
    assert state(tree, between) is TreeState.PRISTINE  # the record is about these files
    edit(tree, ROUTER, "new\n", "newer\n")
    moved = commit(tree, "Moved on")
    with refused(tree, "--unreleased"):
        apply_series(tree, between.patches)
    assert take(tree, between).status.unreleased.commit == moved


def test_patches_of_another_version_are_one_error(between):
    tree = between.checkout
    take(tree, between)
    patch = between.series[0]
    patch.write_bytes(patch.read_bytes().replace(b"+hook = None", b"+hook = True"))
    for move in (apply_series, revert_series):
        with refused(tree, "other patches of", "revert with that version", "git checkout"):
            move(tree, between.patches)
    git("checkout", "--quiet", "--", ".", cwd=tree)  # unpatched, so the record does not matter
    (tree / NEW).unlink()
    assert state(tree, between) is TreeState.UNKNOWN


def test_damaged_patches_are_found_by_a_file_of_the_release(between):
    edit(between.checkout, ROUTER, "new\n", "")
    edit(between.checkout, ROUTER, "line twenty\n", "line 20\n")
    edit(between.checkout, SCHEDULE, "# schedule", "# another")
    commit(between.checkout, "Another file differs")
    patch = between.series[0]
    patch.write_bytes(patch.read_bytes().replace(b"+hook = None", b"+hook = True"))
    with refused(between.checkout, "damaged", ROUTER):
        take(between.checkout, between)


# -- several lines


def test_the_nearest_of_several_lines_is_taken_and_said(between, capsys):
    add_line(between, "core_r9.2.0", "1" * 40)
    with refused(between.checkout, "several release lines", "--line core_r9.1.0", "core_r9.2.0"):
        take(between.checkout, between)
    change = take(between.checkout, between, line="core_r9.2.0")
    assert change.status.line.name == "core_r9.2.0"
    revert_series(between.checkout, between.patches)
    # make the second line farther away: its tree has another dispatcher
    versions = between.patches / "versions.toml"
    other = '["' + "a" * 40 + '", "' + "b" * 40 + '"]'
    versions.write_text(versions.read_text() + f'blobs = {{ "{DISPATCHER}" = {other} }}\n')
    argv = ["apply", str(between.checkout), "--unreleased", "--patches", str(between.patches)]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert f"({LINE}, {between.commit[:12]}, close to {TAG} (1 file differs))" in out
    assert f"differ from {TAG}: {ROUTER}\n" in out
    assert "is nearer than the other lines that fit: core_r9.2.0 (2 of 6 files differ from" in out
    assert "hunks moved by 2 lines" in out  # both hunks of the router, by the new first line
    assert f"make check MEGATRON={between.checkout}" in out


def test_of_several_lines_the_one_with_the_most_patches_is_taken(between):
    """The fourth patch is what the second line need not have, and this tree does."""
    add_line(between, "core_r9.2.0", "1" * 40, left_out=[4])
    change = take(between.checkout, between)
    assert (change.status.line.name, len(change.status.series.patches)) == (LINE, 4)
    assert "core_r9.2.0" in change.others
    revert_series(between.checkout, between.patches)
    # the control: a tree that has it already takes the second line
    edit(between.checkout, README, "Routing.\n", "Routing.\n\nReplay.\n")
    commit(between.checkout, "Document it here")
    assert take(between.checkout, between).status.line.name == "core_r9.2.0"


# -- status


@pytest.fixture
def status(upstream, capsys):
    def run(tree):
        code = main(["status", str(tree), "--patches", str(upstream.patches)])
        return code, capsys.readouterr().out

    return run


def test_status_of_an_unreleased_tree(between, status):
    tree = between.checkout
    code, out = status(tree)
    assert code == 1
    assert out.startswith(f"unknown: {tree}\n{tree} is close to {TAG}, but no release: 1 of its 6")
    assert "--unreleased" in out
    take(tree, between)
    about = f"unreleased: {LINE}, {between.commit[:12]}, close to {TAG} (1 file differs), 4 patches"
    known = f"applied: {tree}\n{about} of 6 files\ndiffer from {TAG}: {ROUTER}\ngroups: r3\n"
    assert status(tree) == (0, f"{known}not checked: make check MEGATRON={tree}\n")
    record = read_record(tree)
    checked = CheckedOn("2026-11-22", files_digest(tree), "0.1.0")
    write_record(tree, Record(record.tree, checked))
    done = "checked on 2026-11-22 by megatron-r3 0.1.0"
    assert status(tree) == (0, f"{known}{done}\n")
    edit(tree, OTHER, "other = 1", "other = 2")
    again = f"{done}, but its files have changed since: make check MEGATRON={tree}\n"
    assert status(tree) == (0, f"{known}{again}")


def test_status_of_a_release_that_was_checked(upstream, status):
    tree = upstream.checkout
    apply_series(tree, upstream.patches)
    write_record(tree, Record(checked=CheckedOn("2026-11-22", files_digest(tree), "0.1.0")))
    assert status(tree)[1].endswith(
        "6 files\ngroups: r3\nchecked on 2026-11-22 by megatron-r3 0.1.0\n"
    )
    revert_series(tree, upstream.patches)
    assert not record_path(tree).exists()
