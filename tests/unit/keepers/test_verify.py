"""Checking whole series against commits, without a checkout."""

import re

import pytest
from patching_bump import everything
from patching_upstream import (
    BODY,
    LINE,
    OTHER,
    PACKAGE,
    README,
    ROUTER,
    SCHEDULE,
    TAG,
    add_line,
    clone,
    commit,
    git,
    write,
)

from keepers.patches import main
from keepers.verify import check_rules, verify_repo, verify_tree
from megatron_r3.patching.git import PatchingError
from megatron_r3.patching.versions import read_versions


def verify(upstream, repo, place=0):
    line = read_versions(upstream.patches).line(LINE)
    return verify_tree(repo, line, line.trees[place])


def edit(file, old, new):
    text = file.read_bytes()
    assert old in text
    file.write_bytes(text.replace(old, new, 1))


def package_as_git(upstream):
    git("init", "--quiet", cwd=upstream.package)
    commit(upstream.package, "The source package")
    return upstream.package


def test_nothing_is_written_to_the_clone(upstream):
    before = everything(upstream.checkout)
    done = verify(upstream, upstream.checkout)
    assert everything(upstream.checkout) == before  # not an object more
    assert (done.num_patches, done.num_files) == (4, 6)


@pytest.mark.parametrize("kind", ["--bare", "--shared", "--depth=1", "worktree"])
def test_any_repository(upstream, tmp_path, kind):
    repo = clone(upstream.checkout, tmp_path / "with spaces: ü", kind)
    assert verify(upstream, repo).num_patches == 4


def test_a_source_package_as_a_git_tree(upstream):
    done = verify(upstream, package_as_git(upstream), 1)
    assert (done.num_patches, done.num_files) == (3, 5)
    assert done.base == git("rev-parse", "HEAD", cwd=upstream.package).strip()
    assert verify(upstream, upstream.package, 0) is None


@pytest.mark.parametrize("path", [SCHEDULE, README])
def test_a_head_that_is_not_the_package(upstream, path):
    repo = package_as_git(upstream)
    write(repo, path, "mine\n")
    assert verify(upstream, repo, 1) is not None
    commit(repo, "Mine")
    assert verify(upstream, repo, 1) is None


@pytest.mark.parametrize(
    ("place", "old", "new", "message"),
    [
        (1, b" line 29\n", b" line 92\n", f"0002-.* does not apply at {ROUTER}:"),
        (0, b"+hook = None", b"+hook = True", f"0001-.* is damaged.* {ROUTER}"),
        # the file would come back, but not as executable as it was
        (
            2,
            b"deleted file mode 100755",
            b"deleted file mode 100644",
            "name another mode of megatron/core/old.sh than 100755",
        ),
        (1, b"index ", b"similarity index ", "0002-.*not supported"),
    ],
)
def test_a_series_that_does_not_give_what_it_promises(upstream, place, old, new, message):
    edit(upstream.series[place], old, new)
    with pytest.raises(PatchingError, match=message):
        verify(upstream, upstream.checkout)


def test_a_commit_that_the_patches_are_not_for(upstream):
    base = git("rev-parse", TAG, cwd=upstream.checkout).strip()
    write(upstream.checkout, ROUTER, (upstream.checkout / ROUTER).read_text() + "more\n")
    new = commit(upstream.checkout, "Change the router")  # the patches would fit
    edit(upstream.patches / "versions.toml", base.encode(), new.encode())
    with pytest.raises(
        PatchingError, match=f"start from other contents than the commit of .* has: {ROUTER}"
    ):
        verify(upstream, upstream.checkout)


def test_one_tree_that_fails_does_not_hide_the_others(upstream):
    base = git("rev-parse", TAG, cwd=upstream.checkout).strip()
    add_line(upstream, "core_r9.2.0", base, left_out=[3, 4])
    edit(upstream.patches / "core_r9.2.0" / upstream.series[0].name, b"hook = None", b"hook = 1")
    checks = verify_repo(upstream.checkout, read_versions(upstream.patches))
    assert [(bool(c.verified), bool(c.error)) for c in checks] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    (check,) = verify_repo(upstream.checkout, read_versions(upstream.patches), "core_r9.2.0")
    assert "damaged" in check.error


# --- rules


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"Off (the default): nothing changes.\n\n", b"", r"no paragraph 'Off \(the default\)"),
        (b"Off (the default): nothing changes.", b"Off (the default):", "no paragraph"),
        (b"Off (the default)", b"It is off (the default)", "no paragraph"),
        (b"\nForwarded: no, made up\n", b"", "no trailer 'Forwarded"),
        (b"Forwarded: no, made up", b"Forwarded:", "no trailer"),
        (b"Forwarded: no, made up\n", b"Forwarded: no, made up\n\nMore.\n", "no trailer"),
    ],
)
def test_a_message_without_what_a_reader_needs(upstream, old, new, message):
    assert check_rules(read_versions(upstream.patches)) == []
    edit(upstream.series[1], old, new)
    (wrong,) = check_rules(read_versions(upstream.patches))
    assert wrong.startswith(f"{LINE}/{upstream.series[1].name}: ")
    assert re.search(message, wrong)


@pytest.mark.parametrize(("num_lines", "num_wrong"), [(100, 0), (101, 1)])
def test_a_patch_is_no_longer_than_can_be_read(upstream, num_lines, num_wrong):
    write(upstream.checkout, OTHER, "other = 1\n" + "++ x\n-- y\n" * (num_lines // 2))
    if num_lines % 2:
        write(upstream.checkout, OTHER, (upstream.checkout / OTHER).read_text() + "odd\n")
    commit(upstream.checkout, f"Be long\n\n{BODY}")
    flags = ["--full-index", "--no-numbered", "--start-number=5", "-1", "-o"]
    git("format-patch", *flags, str(upstream.patches / LINE), cwd=upstream.checkout)
    wrong = check_rules(read_versions(upstream.patches))
    assert len(wrong) == num_wrong
    assert all(f"changes {num_lines} lines, more than 100" in what for what in wrong)


def second_line(upstream, left_out=()):
    add_line(upstream, "core_r9.2.0", "1" * 40, left_out)
    return upstream.patches / "core_r9.2.0"


def test_a_gap_breaks_no_rule(upstream):
    second_line(upstream, [3])
    assert check_rules(read_versions(upstream.patches)) == []


def test_a_number_that_is_another_concern_elsewhere(upstream):
    folder = second_line(upstream)
    edit(folder / upstream.series[3].name, b"Document the hook", b"Describe the hook")
    (wrong,) = check_rules(read_versions(upstream.patches))
    assert wrong.count(upstream.series[3].name) == 2
    assert "core_r9.2.0/" in wrong
    for line in (LINE, "core_r9.2.0"):
        assert check_rules(read_versions(upstream.patches), line) == [wrong]
    add_line(upstream, "core_r9.3.0", "1" * 40)
    assert check_rules(read_versions(upstream.patches), "core_r9.3.0") == []


def test_a_subject_that_has_another_number_elsewhere(upstream):
    folder = second_line(upstream, [3])
    name = upstream.series[3].name
    (folder / name).rename(folder / name.replace("0004", "0003"))
    wrong = check_rules(read_versions(upstream.patches))
    assert len(wrong) == 2  # with the owner of the subject, and with that of the number
    assert all("0003-Document" in what for what in wrong)


# --- the command


def test_the_command(upstream, capsys):
    patches = ["--patches", str(upstream.patches)]
    assert main(["verify", str(upstream.checkout), *patches]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{LINE}, {TAG}: 4 patches of 6 files, applied and taken back to the byte"
    assert second == f"{LINE}, {PACKAGE}: not checked, the clone lacks this tree's commit or files"

    assert main(["verify", str(package_as_git(upstream)), *patches, "--line", LINE]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{LINE}, {TAG}: not checked, the clone lacks this tree's commit or files"
    assert second.endswith(f"back to the byte; not in {PACKAGE}, so left out: {README}")

    edit(upstream.series[0], b"+hook = None", b"+hook = True")
    edit(upstream.series[1], b"Forwarded", b"Sent")
    assert main(["verify", str(upstream.checkout), *patches]) == 1
    printed = capsys.readouterr()
    assert f"{TAG}: FAILED: " in printed.out
    assert "no trailer" in printed.out
    assert printed.err == f"error: trees that failed: {TAG}; rules broken: 1\n"


def test_nothing_to_check_is_no_success(upstream, tmp_path, capsys):
    git("init", "--quiet", "empty", cwd=tmp_path)
    patches = ["--patches", str(upstream.patches)]
    assert main(["verify", str(tmp_path / "empty"), *patches]) == 1
    assert "nothing was checked" in capsys.readouterr().err
    for repo in (upstream.package, tmp_path / "nowhere", upstream.checkout / "megatron"):
        assert main(["verify", str(repo), *patches]) == 1
        assert f"error: {repo} is no git repository" in capsys.readouterr().err
    assert main(["verify", str(upstream.checkout), *patches, "--line", "core_r1"]) == 1
    assert "core_r1 is no release line" in capsys.readouterr().err
