"""Exporting a checkout's commits as the patches of a line, to the byte."""

import os
import subprocess

import pytest
from patching_export import add_commit, bytes_of, committed_upstream
from patching_hostile import hostile
from patching_upstream import (
    BODY,
    LINE,
    NEW,
    OTHER,
    TAG,
    git,
    snapshot,
    write,
)

from keepers.export import export_series
from keepers.patches import main
from megatron_r3.patching.git import PatchingError
from megatron_r3.patching.series import read_series


@pytest.fixture
def upstream(tmp_path):
    return committed_upstream(tmp_path)


def test_what_am_committed_is_exported_again_to_the_byte(upstream):
    expected = bytes_of(upstream.patches / LINE)
    before = snapshot(upstream.patches, mtimes=True)
    for check in (True, False):
        done = export_series(upstream.checkout, upstream.patches, check=check)
        assert done.names == tuple(file.name for file in upstream.series)
        assert done.differ == ()
    assert snapshot(upstream.patches, mtimes=True) == before  # not even written again
    for patch in upstream.series:
        patch.unlink()
    export_series(upstream.checkout, upstream.patches, line=LINE)
    assert bytes_of(upstream.patches / LINE) == expected


@pytest.mark.parametrize("pristine", [False, True])
def test_check_names_what_differs(upstream, pristine):
    if pristine:
        git("checkout", "--quiet", TAG, cwd=upstream.checkout)
    assert export_series(upstream.checkout, upstream.patches, check=True).differ == ()
    patch = upstream.series[1]
    patch.write_bytes(patch.read_bytes().replace(b"Why.", b"Because.") + b"-- \n2.39.5\n\n")
    before = snapshot(upstream.patches, mtimes=True)
    done = export_series(upstream.checkout, upstream.patches, check=True)
    assert done.differ == (patch.name,)
    assert snapshot(upstream.patches, mtimes=True) == before
    if not pristine:
        export_series(upstream.checkout, upstream.patches)
        assert b"Because" not in patch.read_bytes()


def test_check_on_the_base_needs_patches_that_apply(upstream):
    git("checkout", "--quiet", TAG, cwd=upstream.checkout)
    patch = upstream.series[1]
    patch.write_bytes(patch.read_bytes().replace(b" line 29\n", b" line 92\n"))
    before = snapshot(upstream.checkout)
    with pytest.raises(PatchingError, match="git am stopped at 0002-Bind"):
        export_series(upstream.checkout, upstream.patches, check=True)
    assert snapshot(upstream.checkout) == before
    assert not (upstream.checkout / ".git/rebase-apply").exists()


def test_the_users_git_configuration_changes_nothing(upstream, tmp_path, monkeypatch):
    git("notes", "add", "-m", "a note", cwd=upstream.checkout)
    hostile(tmp_path, monkeypatch, upstream.checkout)
    # the negative control: git without the pins writes something else altogether
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env |= {"GIT_COMMITTER_NAME": "A Person", "GIT_COMMITTER_EMAIL": "person@example.com"}
    command = ["git", "format-patch", "--stdout", "-1"]
    plain = subprocess.run(command, cwd=upstream.checkout, env=env, capture_output=True).stdout
    assert b"Document the hook" in plain
    assert b"--boundary" in plain
    assert plain != upstream.series[3].read_bytes()
    assert export_series(upstream.checkout, upstream.patches, check=True).differ == ()
    monkeypatch.delenv("GIT_DIR")
    monkeypatch.delenv("GIT_INDEX_FILE")
    pins = ("-c", "core.autocrlf=false", "-c", f"core.attributesFile={os.devnull}")
    git(*pins, "checkout", "--quiet", TAG, cwd=upstream.checkout)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    assert export_series(upstream.checkout, upstream.patches, check=True).differ == ()


def test_authors_dates_and_long_subjects_come_through(upstream):
    subject = "Let the höok see " + "more and more " * 8 + "of [it]"
    write(upstream.checkout, OTHER, "other = 'ü\r'\r\n")
    env = {"GIT_AUTHOR_DATE": "2020-02-29T12:34:56-0330", "GIT_AUTHOR_NAME": "Zoë, of [R3]"}
    git("add", "--all", cwd=upstream.checkout)
    message = f"[a] {subject}\n\n{BODY.replace('Why.', '-- >8 --')}"
    os.environ.update(env)
    try:
        git("commit", "--quiet", "-m", message, cwd=upstream.checkout)
    finally:
        for key in env:
            del os.environ[key]
    export_series(upstream.checkout, upstream.patches)
    text = upstream.series[4].read_text()
    assert "Date: Sat, 29 Feb 2020 12:34:56 -0330" in text
    assert read_series(upstream.patches / LINE).patches[4].subject == f"[a] {subject}"
    git("checkout", "--quiet", TAG, cwd=upstream.checkout)
    assert export_series(upstream.checkout, upstream.patches, check=True).differ == ()


# --- the command


def test_the_command(upstream, capsys):
    tree, folder = upstream.checkout, upstream.patches / LINE
    arguments = ["export", str(tree), "--patches", str(upstream.patches)]
    same = f"{folder} is what {tree} exports: 4 patches, every byte\n"
    for flags in (["--check"], [], ["--line", LINE]):
        assert main(arguments + flags) == 0
        assert capsys.readouterr().out == same
    add_commit(upstream, "Do more")
    assert main([*arguments, "--check"]) == 1
    error = f"error: {tree} exports other patches than {folder} has: 0005-Do-more.patch"
    assert capsys.readouterr().err.startswith(error)
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"5 patches in {folder}; changed: 0005-Do-more.patch\n"
    assert (upstream.checkout / NEW).exists()
    (tree / OTHER).unlink()
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert OTHER in printed.err
