"""Exporting a checkout's commits as the patches of a line, to the byte."""

import errno
import os
import signal
import subprocess

import pytest
from patching_upstream import (
    BODY,
    KILLED,
    LINE,
    NEW,
    OTHER,
    README,
    ROUTER,
    TAG,
    add_line,
    commit,
    git,
    hostile,
    make_upstream,
    run_cli,
    snapshot,
    write,
)

from megatron_r3.cli import main
from megatron_r3.patching.errors import PatchingError
from megatron_r3.patching.export import export_series
from megatron_r3.patching.series import read_series

SECOND = "core_r9.2.0"


@pytest.fixture
def upstream(tmp_path):
    """Its checkout has the patches as commits."""
    upstream = make_upstream(tmp_path)
    git("am", "--quiet", *map(str, upstream.series), cwd=upstream.checkout)
    return upstream


def base(upstream):
    return git("rev-parse", TAG, cwd=upstream.checkout).strip()


def bytes_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def add_commit(upstream, subject, text="more\n", path=OTHER, body=BODY):
    old = (upstream.checkout / path).read_text() if (upstream.checkout / path).exists() else ""
    write(upstream.checkout, path, old + text)
    return commit(upstream.checkout, f"{subject}\n\n{body}")


def only(upstream, *places):
    """Leave of the patches' commits only those at these places, in this order."""
    commits = git("rev-list", "--reverse", f"{TAG}..HEAD", cwd=upstream.checkout).split()
    git("reset", "--quiet", "--hard", TAG, cwd=upstream.checkout)
    for place in places:
        git("cherry-pick", commits[place], cwd=upstream.checkout)


def refuse(upstream, *words, **arguments):
    """Both the export and its check refuse, and say all of `words`; nothing is written."""
    before = snapshot(upstream.patches, mtimes=True)
    for check in (False, True):
        with pytest.raises(PatchingError) as error:
            export_series(upstream.checkout, upstream.patches, check=check, **arguments)
        for word in words:
            assert word in str(error.value)
    assert snapshot(upstream.patches, mtimes=True) == before


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


def test_check_on_a_base_that_lacks_all_files_of_a_patch(upstream):
    git("checkout", "--quiet", TAG, cwd=upstream.checkout)
    (upstream.checkout / README).unlink()
    lacking = commit(upstream.checkout, "Without the README")
    with open(upstream.patches / "versions.toml", "a") as versions:
        versions.write(
            f'\n[[lines."{LINE}".trees]]\nname = "lacking"\ncommit = "{lacking}"\n'
            f'absent = ["{README}"]\n'
        )
    done = export_series(upstream.checkout, upstream.patches, check=True)
    assert done.names == tuple(file.name for file in upstream.series[:3])
    assert done.differ == ()
    versions = upstream.patches / "versions.toml"
    versions.write_text(versions.read_text().rpartition("absent")[0])
    with pytest.raises(PatchingError, match="git am stopped at 0004-Document"):
        export_series(upstream.checkout, upstream.patches, check=True)


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


@pytest.mark.parametrize("kind", ["worktree", "shallow", "with spaces"])
def test_any_checkout(upstream, tmp_path, kind):
    tree = tmp_path / f"{kind} 'ü"
    if kind == "worktree":
        git("worktree", "add", "--quiet", "--detach", str(tree), cwd=upstream.checkout)
    else:
        depth = ["--depth=5"] if kind == "shallow" else []
        source = f"file://{upstream.checkout}"
        write(upstream.checkout, OTHER, "other = 0\n")
        git("clone", "--quiet", *depth, source, str(tree), cwd=tmp_path)
    assert export_series(tree, upstream.patches, check=True).differ == ()
    git("checkout", "--quiet", base(upstream), cwd=tree)
    assert export_series(tree, upstream.patches, check=True).differ == ()


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


# --- numbers


def numbers(upstream, line=LINE):
    return [int(file.name[:4]) for file in sorted((upstream.patches / line).glob("*.patch"))]


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


def test_a_concern_may_be_renamed_where_no_other_line_has_it(upstream):
    message = f"Drop the old script\n\n{BODY}"
    only(upstream, 0, 1, 2)
    git("commit", "--quiet", "--amend", "-m", message, cwd=upstream.checkout)
    export_series(upstream.checkout, upstream.patches)
    assert [f.name for f in upstream.series][2:] == ["0003-Drop-the-old-script.patch"]


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
    refuse(upstream, "above no known commit", TAG, "--base")
    refuse(upstream, "--line", base=TAG)
    refuse(upstream, "no commit 'nothing'", base="nothing", line=LINE)
    refuse(upstream, "is no release line", base=TAG, line="core_r1")
    done = export_series(upstream.checkout, upstream.patches, base=TAG, line=LINE, check=True)
    assert done.differ == ()
    git("checkout", "--quiet", "--orphan", "elsewhere", cwd=upstream.checkout)
    commit(upstream.checkout, "Elsewhere")
    refuse(upstream, "is not above", base=TAG, line=LINE)


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


@pytest.mark.parametrize("n", [0, 2])
def test_an_export_that_was_killed_is_finished_by_the_next(upstream, n):
    expected = bytes_of(upstream.patches / LINE)
    for patch in upstream.series:
        patch.write_bytes(patch.read_bytes().replace(b"Why.", b"Because."))
    arguments = ("export", upstream.checkout, "--patches", upstream.patches)
    done = run_cli(*arguments, prelude=KILLED.format(n=n))
    assert done.returncode == -signal.SIGKILL, done.stderr
    now = bytes_of(upstream.patches / LINE)
    assert sum(now[name] == expected[name] for name in expected) == n  # each old or new
    export_series(upstream.checkout, upstream.patches)
    assert bytes_of(upstream.patches / LINE) == expected


def test_a_patch_in_the_folder_that_cannot_be_read_is_replaced(upstream):
    expected = bytes_of(upstream.patches / LINE)
    upstream.series[1].write_bytes(b"\xff garbage\n")
    write(upstream.patches, f"{LINE}/README.md", "mine\n")
    export_series(upstream.checkout, upstream.patches)
    assert bytes_of(upstream.patches / LINE) == expected | {"README.md": b"mine\n"}


# --- the command


def test_the_command(upstream, capsys):
    tree, folder = upstream.checkout, upstream.patches / LINE
    arguments = ["export", str(tree), "--patches", str(upstream.patches)]
    same = f"{folder} is what {tree} exports: 4 patches, every byte\n"
    for flags in (["--check"], [], ["--line", LINE, "--base", TAG]):
        assert main(arguments + flags) == 0
        assert capsys.readouterr().out == same
    add_commit(upstream, "Do more")
    assert main([*arguments, "--check"]) == 1
    error = f"error: {folder} is not what {tree} exports: 0005-Do-more.patch\n"
    assert capsys.readouterr().err == error
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"5 patches in {folder}; changed: 0005-Do-more.patch\n"
    assert (upstream.checkout / NEW).exists()
    (tree / OTHER).unlink()
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert OTHER in printed.err
