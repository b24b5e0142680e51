"""Trees between releases: taken by a word alone, recorded, reverted to the byte, else refused."""

import pytest
from patching_upstream import (
    DISPATCHER,
    LINE,
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
)

from megatron_r3.cli import main
from megatron_r3.patching.apply import apply_series, revert_series
from megatron_r3.patching.record import (
    CheckedOn,
    Record,
    files_digest,
    read_record,
    record_path,
    write_record,
)
from megatron_r3.patching.tree import TreeState
from tests.unit.patching.test_apply import state
from tests.unit.patching.test_refusals import edit

DOT = ".megatron-r3.json"


@pytest.fixture
def between(upstream):
    """The checkout at a commit after its release, where the patches fit in other places."""
    edit(upstream.checkout, ROUTER, "line 1\n", "new\nline 1\n")
    edit(upstream.checkout, ROUTER, "line 20\n", "line twenty\n")
    commit(upstream.checkout, "Between releases")
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
    with refused(between.checkout, ROUTER, "--unreleased", "UNRELEASED=1", TAG, LINE, "1 of the 6"):
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


def test_a_record_that_cannot_be_written(package):
    (package.package / f".{DOT}.megatron-r3-new").mkdir()
    with refused(package.package, f"cannot write {package.package / DOT}"):
        take(package.package, package)


# -- records that are not what was written, and patches that are others


DAMAGES = {
    "cut": (lambda text: text[:-40], "line"),
    "other json": (lambda text: '{"format": 3, "tree": []}', "checked"),
    "older": (lambda text: text.replace('"format": 3', '"format": 2'), "its format is 2"),
    "no diff": (lambda text: text.replace("diff --git", "Diff"), "its diff is empty"),
    "another field": (lambda text: text.replace('"near"', '"far"'), "'far'"),
    "edited": (lambda text: text.replace("+hook = None", "+hook = True"), "does not apply"),
    "context": (lambda text: text.replace(" line 29", " line 92"), "does not apply"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_record_is_one_error(between, how):
    tree = between.checkout
    take(tree, between)
    path = record_path(tree)
    change, reason = DAMAGES[how]
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    told = {}
    before = snapshot(tree, mtimes=True)
    for command in ("status", "apply", "revert"):
        done = run_cli(command, tree, "--patches", between.patches)
        told[command] = (done.returncode, done.stderr)
    assert snapshot(tree, mtimes=True) == before
    code, said = told["revert"]
    assert code == 1
    assert said.startswith("error: ")
    assert str(path) in said
    assert reason in said
    if reason.startswith("does not"):  # what is wrong shows where the diff is applied
        assert told["status"][0] == told["apply"][0] == 0
    else:
        assert told["status"] == told["apply"] == told["revert"]


def test_a_link_in_place_of_a_record_is_not_followed(package):
    take(package.package, package)
    (package.package / DOT).rename(package.package / "elsewhere")
    (package.package / DOT).symlink_to("elsewhere")
    with refused(package.package, DOT, "is a symlink"):
        revert_series(package.package, package.patches)


@pytest.mark.parametrize("gone", [False, True])
def test_other_patches_than_those_in_the_tree(between, gone):
    """The record alone reverts the tree, as with a later megatron-r3; nothing is mixed."""
    tree = between.checkout
    before = snapshot(tree)
    take(tree, between)
    if gone:  # today's patches know no line of that name
        (between.patches / LINE).rename(between.patches / "core_r9.9.9")
        versions = between.patches / "versions.toml"
        versions.write_text(versions.read_text().replace(LINE, "core_r9.9.9"))
    else:
        patch = between.series[0]
        patch.write_bytes(patch.read_bytes().replace(b"+hook = None", b"+hook = True"))
    assert "applied: " in status_of(between)
    with refused(tree, "other patches of", "revert the tree first"):
        apply_series(tree, between.patches)
    assert revert_series(tree, between.patches).status.state is TreeState.PRISTINE
    assert snapshot(tree) == before
    assert not record_path(tree).exists()


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
    commit(tree, "Moved on")
    with refused(tree, "--unreleased"):
        apply_series(tree, between.patches)
    take(tree, between)


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
    assert f"({LINE}, close to {TAG} (1 file differs))" in out
    assert f"files that differ from {TAG}: {ROUTER}\n" in out
    assert "is nearer than the other lines that fit: core_r9.2.0 (2 of 6 files differ from" in out
    assert "hunks moved by 2 lines" in out  # both hunks of the router, by the new first line
    assert f"make check MEGATRON={between.checkout}" in out


def test_of_several_lines_the_one_with_the_most_patches_is_taken(between):
    """The fourth patch is what the second line need not have, and this tree does."""
    add_line(between, "core_r9.2.0", "1" * 40, left_out=[4])
    change = take(between.checkout, between)
    assert (change.status.line.name, change.status.unreleased.num_patches) == (LINE, 4)
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
    assert out.startswith(f"unknown: {tree}\n{tree} is close to {TAG}, but no release: 1 of the 6")
    assert "--unreleased" in out
    take(tree, between)
    about = f"unreleased: {LINE}, close to {TAG} (1 file differs), 4 patches"
    known = (
        f"applied: {tree}\n{about} of 6 files\nfiles that differ from {TAG}: {ROUTER}\ngroups: r3\n"
    )
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
