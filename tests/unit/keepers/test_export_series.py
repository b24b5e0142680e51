"""Which commits are a series, which numbers and base it has, and what is no series."""

import errno
import os
import subprocess

import pytest
from patching_export import (
    SECOND,
    add_commit,
    base,
    bytes_of,
    committed_upstream,
    numbers,
    only,
    refuse,
)
from patching_upstream import (
    BODY,
    LINE,
    OTHER,
    ROUTER,
    TAG,
    add_line,
    commit,
    git,
    snapshot,
    write,
)

from keepers.export import export_series
from megatron_r3.patching.git import PatchingError


@pytest.fixture
def upstream(tmp_path):
    return committed_upstream(tmp_path)


# --- numbers


def test_a_commit_that_is_gone_leaves_a_gap(upstream):
    last = upstream.series[3].read_bytes()
    only(upstream, 0, 1, 3)
    done = export_series(upstream.checkout, upstream.patches)
    assert done.differ == ("0003-Add-replay-drop-the-old-script.patch",)
    assert numbers(upstream) == [1, 2, 4]
    assert upstream.series[2].read_bytes() == last


def test_a_new_concern_gets_the_next_number_that_no_line_uses(upstream):
    add_line(upstream, SECOND, "1" * 40)
    file = upstream.patches / SECOND / "0004-Document-the-hook-in-the-README.patch"
    text = file.read_text().replace("Document", "Describe")
    file.with_name("0005-Describe-the-hook-in-the-README.patch").write_text(text)
    file.unlink()
    add_commit(upstream, "Do more")
    add_commit(upstream, "Do still more")
    export_series(upstream.checkout, upstream.patches, line=LINE)
    assert numbers(upstream) == [1, 2, 3, 4, 6, 7]
    assert upstream.series[4].name == "0006-Do-more.patch"


def test_a_subject_has_the_number_of_the_other_lines(upstream):
    add_line(upstream, SECOND, "1" * 40)
    for place, file in enumerate(reversed(upstream.series)):
        number = 40 - 10 * place
        moved = f"{number:04d}{file.name[4:]}"
        (upstream.patches / SECOND / file.name).rename(upstream.patches / SECOND / moved)
    before = [file.read_bytes() for file in upstream.series]
    export_series(upstream.checkout, upstream.patches, line=LINE)
    assert numbers(upstream) == [10, 20, 30, 40]
    assert [file.read_bytes() for file in upstream.series] == before  # no number in a content


def test_no_free_number_in_the_middle(upstream):
    add_line(upstream, SECOND, "1" * 40)
    only(upstream, 0, 1)
    add_commit(upstream, "Do more")
    git("am", "--quiet", str(upstream.series[2]), cwd=upstream.checkout)
    refuse(upstream, "'Do more' is new", "between 2 and 3", line=LINE)


def test_commits_in_another_order(upstream):
    only(upstream, 0, 3, 1, 2)
    refuse(upstream, "'Bind the hook", "has the number 2, but comes after", "which has 4")


# --- which line and base


def test_the_nearest_line(upstream):
    git("checkout", "--quiet", TAG, cwd=upstream.checkout)
    write(upstream.checkout, OTHER, "other = 92\n")
    add_line(upstream, SECOND, commit(upstream.checkout, "Release 9.2.0"))
    git("am", "--quiet", *map(str, upstream.series), cwd=upstream.checkout)
    done = export_series(upstream.checkout, upstream.patches, check=True)
    assert done.folder == upstream.patches / SECOND
    assert done.differ == ()
    with pytest.raises(PatchingError, match=r"'Release 9\.2\.0' is new, and there is no free"):
        export_series(upstream.checkout, upstream.patches, line=LINE)


def test_two_lines_of_one_commit(upstream):
    add_line(upstream, SECOND, base(upstream))
    refuse(upstream, "give --line", LINE, SECOND)
    export_series(upstream.checkout, upstream.patches, line=SECOND)


def test_a_base_that_is_not_known(upstream):
    versions = upstream.patches / "versions.toml"
    versions.write_text(versions.read_text().replace(base(upstream), "1" * 40))
    refuse(upstream, "above no known commit", TAG)
    refuse(upstream, "is no release line", line="core_r1")


# --- refusals


def test_nothing_above_the_base(upstream):
    git("checkout", "--quiet", TAG, cwd=upstream.checkout)
    with pytest.raises(PatchingError, match="no commits above"):
        export_series(upstream.checkout, upstream.patches)


@pytest.mark.parametrize("staged", [False, True])
def test_uncommitted_changes(upstream, staged):
    write(upstream.checkout, ROUTER, "mine\n")
    if staged:
        git("add", ROUTER, cwd=upstream.checkout)
    refuse(upstream, ROUTER, "uncommitted changes")


def test_in_the_middle_of_something(upstream):
    broken = upstream.checkout.parent / "broken.patch"
    broken.write_text(upstream.series[0].read_text().replace(" line 9\n", " nine\n"))
    with pytest.raises(subprocess.CalledProcessError):
        git("am", str(broken), cwd=upstream.checkout)
    refuse(upstream, "git am or git rebase is in progress")
    git("am", "--abort", cwd=upstream.checkout)
    with pytest.raises(subprocess.CalledProcessError):
        git("rebase", "--quiet", "--exec", "false", "HEAD~1", cwd=upstream.checkout)
    refuse(upstream, "git rebase is in progress")
    git("rebase", "--abort", cwd=upstream.checkout)
    export_series(upstream.checkout, upstream.patches)


def test_a_merge(upstream):
    whole = git("rev-parse", "HEAD", cwd=upstream.checkout).strip()
    git("checkout", "--quiet", "--detach", "HEAD~1", cwd=upstream.checkout)
    add_commit(upstream, "On the side")
    git("merge", "--quiet", "-m", f"Merge\n\n{BODY}", whole, cwd=upstream.checkout)
    refuse(upstream, "merge commits", git("rev-parse", "HEAD", cwd=upstream.checkout)[:12])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"text": "more\n" * 101}, ["0005-Do-more.patch", "changes 101 lines"]),
        ({"body": "Why.\n\nForwarded: no"}, ["0005-Do-more.patch", "Off (the default)"]),
        ({"body": "Off (the default): same."}, ["0005-Do-more.patch", "Forwarded"]),
        ({"subject": "Ask the hook"}, ["two commits have the subject 'Ask the hook'"]),
        ({"path": "link", "text": ""}, ["0005-Do-more.patch", "not supported"]),
    ],
)
def test_commits_that_are_not_fit(upstream, arguments, words):
    if arguments.get("path") == "link":
        (upstream.checkout / "link").symlink_to(OTHER)
        commit(upstream.checkout, f"Do more\n\n{BODY}")
    else:
        add_commit(upstream, **({"subject": "Do more"} | arguments))
    refuse(upstream, *words)


def test_a_commit_without_a_change(upstream):
    git("commit", "--quiet", "--allow-empty", "-m", f"Nothing\n\n{BODY}", cwd=upstream.checkout)
    refuse(upstream, "changes nothing")


def test_no_checkout(upstream):
    with pytest.raises(PatchingError, match="is no git checkout"):
        export_series(upstream.package, upstream.patches)


@pytest.mark.parametrize("after", range(3))
def test_all_patches_are_written_or_none(upstream, monkeypatch, after):
    only(upstream, 0, 1, 3)
    add_commit(upstream, "Do more")
    for patch in upstream.series[:2]:
        patch.write_bytes(patch.read_bytes().replace(b"Why.", b"Because."))
    before = snapshot(upstream.patches)
    real, calls = os.replace, []

    def failing(*args):
        calls.append(args)
        if len(calls) == after + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing)
        with pytest.raises(PatchingError, match="No space left on device; nothing was changed"):
            export_series(upstream.checkout, upstream.patches)
    assert snapshot(upstream.patches) == before
    export_series(upstream.checkout, upstream.patches)
    assert numbers(upstream) == [1, 2, 4, 5]


def test_a_patch_in_the_folder_that_cannot_be_read_is_replaced(upstream):
    expected = bytes_of(upstream.patches / LINE)
    upstream.series[1].write_bytes(b"\xff garbage\n")
    write(upstream.patches, f"{LINE}/README.md", "mine\n")
    export_series(upstream.checkout, upstream.patches)
    assert bytes_of(upstream.patches / LINE) == expected | {"README.md": b"mine\n"}
