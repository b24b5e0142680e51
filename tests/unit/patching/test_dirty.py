"""Which files are dirty: what git itself says, in every kind of repository, and line ends."""

import os
import shutil
import subprocess

import pytest
from patching_upstream import (
    DISPATCHER,
    FILES,
    NEW,
    OTHER,
    README,
    ROUTER,
    SCHEDULE,
    clone,
    git,
    make_upstream,
    refused,
    snapshot,
    write,
)

from megatron_r3.patching.apply import apply_series, revert_series
from megatron_r3.patching.cleanroom import is_checkout, resolve
from megatron_r3.patching.tree import TreeState, dirty_files, identify
from megatron_r3.patching.versions import read_versions


@pytest.fixture
def upstream(upstream):
    tree = upstream.checkout  # and what a real tree has besides plain text
    write(tree, "tools/run.sh", "#!/bin/sh\n", executable=True)
    (tree / "link").symlink_to(OTHER)
    write(tree, "data.bin", "")
    (tree / "data.bin").write_bytes(bytes(range(256)) * 9)
    git("add", "--all", cwd=tree)
    git("commit", "--quiet", "-m", "More", cwd=tree)
    return upstream


def plain(tree):
    """What git says, with all its configuration."""
    what = ("status", "--porcelain", "-z", "--no-renames", "--untracked-files=no")
    listed = git(*what, "--ignore-submodules=all", cwd=tree)
    return sorted(entry[3:] for entry in listed.split("\0") if entry)


CHANGES = {
    "nothing": lambda tree: None,
    "only its time": lambda tree: os.utime(tree / OTHER, (1, 1)),
    "edited": lambda tree: write(tree, OTHER, "other = 2\n"),
    "edited, same size and time": lambda tree: _edit_unseen(tree),
    "staged": lambda tree: (write(tree, OTHER, "2\n"), git("add", "-u", cwd=tree)),
    "staged, then back": lambda tree: (
        write(tree, OTHER, "2\n"),
        git("add", "-u", cwd=tree),
        write(tree, OTHER, "other = 1\n"),
    ),
    "deleted": lambda tree: (tree / OTHER).unlink(),
    "deleted and staged": lambda tree: git("rm", "--quiet", OTHER, cwd=tree),
    "executable now": lambda tree: (tree / OTHER).chmod(0o755),
    "not executable now": lambda tree: (tree / "tools/run.sh").chmod(0o644),
    "another link": lambda tree: ((tree / "link").unlink(), (tree / "link").symlink_to("x")),
    "a link in place of a file": lambda tree: (
        (tree / OTHER).unlink(),
        (tree / OTHER).symlink_to("x"),
    ),
    "a folder in place of a file": lambda tree: ((tree / OTHER).unlink(), (tree / OTHER).mkdir()),
    "bytes": lambda tree: (tree / "data.bin").write_bytes(b"\r\n" * 9),
    "added": lambda tree: (write(tree, "new.py", "1\n"), git("add", "new.py", cwd=tree)),
    "untracked": lambda tree: write(tree, "new.py", "1\n"),
    "an odd name": lambda tree: (write(tree, "ü\n'\" x", "1\n"), git("add", "--all", cwd=tree)),
    "assumed unchanged": lambda tree: (
        git("update-index", "--assume-unchanged", OTHER, cwd=tree),
        write(tree, OTHER, "2\n"),
    ),
}


def _edit_unseen(tree):
    """As an editor in the moment after a checkout: only the index's own time gives it away."""
    info = (tree / OTHER).stat()
    os.utime(tree / ".git/index", ns=(info.st_mtime_ns, info.st_mtime_ns))
    write(tree, OTHER, "other = 2\n")
    os.utime(tree / OTHER, ns=(info.st_atime_ns, info.st_mtime_ns))


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_what_git_says_it_is(upstream, change):
    CHANGES[change](upstream.checkout)
    index = (upstream.checkout / ".git/index").read_bytes()
    found = sorted(dirty_files(upstream.checkout))
    assert (upstream.checkout / ".git/index").read_bytes() == index  # nothing was refreshed
    assert found == plain(upstream.checkout)
    quiet = ("nothing", "only its time", "untracked", "assumed unchanged")
    assert bool(found) == (change not in quiet)


def _packed(upstream, folder):
    git("pack-refs", "--all", cwd=upstream.checkout)
    git("gc", "--quiet", cwd=upstream.checkout)
    return upstream.checkout


def _shallow(upstream, folder):
    return clone(upstream.checkout, folder, "--depth=1")


def _shared(upstream, folder):
    return clone(upstream.checkout, folder, "--shared")


def _worktree(upstream, folder):
    clone(upstream.checkout, folder, "worktree")
    # the first work tree is elsewhere: what is read must be the second's HEAD and index
    write(upstream.checkout, OTHER, "9\n")
    git("commit", "--quiet", "-am", "Elsewhere", cwd=upstream.checkout)
    return folder


def _submodule(upstream, folder):
    git("init", "--quiet", str(folder), cwd="/")
    allow = ("-c", "protocol.file.allow=always")
    git(*allow, "submodule", "--quiet", "add", str(upstream.checkout), "sub", cwd=folder)
    return folder / "sub"


def _with_a_submodule(upstream, folder):
    sub = _submodule(make_upstream(folder), folder / "outer")
    write(sub, OTHER, "9\n")
    git("commit", "--quiet", "-m", "Add it", cwd=sub.parent)
    for path in upstream.checkout.iterdir():
        if path.name != ".git":
            shutil.move(path, sub.parent)
    git("add", "--all", cwd=sub.parent)
    git("commit", "--quiet", "-m", "All", cwd=sub.parent)
    return sub.parent


def _split(upstream, folder):
    git("update-index", "--split-index", cwd=upstream.checkout)
    assert list((upstream.checkout / ".git").glob("sharedindex.*"))
    return upstream.checkout


def _sha256(upstream, folder):
    shutil.rmtree(upstream.checkout / ".git")
    git("init", "--quiet", "--object-format=sha256", cwd=upstream.checkout)
    git("add", "--all", cwd=upstream.checkout)
    git("commit", "--quiet", "-m", "As it is", cwd=upstream.checkout)
    return upstream.checkout


def _old_head(upstream, folder):
    head = upstream.checkout / ".git/HEAD"
    branch = head.read_text().removeprefix("ref: ").strip()
    head.unlink()
    head.symlink_to(branch)
    return upstream.checkout


def _no_modes(upstream, folder):
    git("config", "core.fileMode", "No", cwd=upstream.checkout)
    for path in (OTHER, ROUTER, "data.bin"):
        (upstream.checkout / path).chmod(0o755)
    return upstream.checkout


def _odd_path(upstream, folder):
    odd = folder / 'a "b\\c\n#d: ü'
    odd.parent.mkdir()
    return upstream.checkout.rename(odd)


REPOSITORIES = {
    "packed": _packed,
    "shallow": _shallow,
    "shared objects": _shared,
    "worktree": _worktree,
    "submodule": _submodule,
    "with a submodule": _with_a_submodule,
    "split index": _split,
    "sha256": _sha256,
    "HEAD is a link": _old_head,
    "no file modes": _no_modes,
    "odd path": _odd_path,
}


@pytest.mark.parametrize("kind", REPOSITORIES)
def test_every_kind_of_repository(upstream, tmp_path, kind):
    tree = REPOSITORIES[kind](upstream, tmp_path / "made")
    assert is_checkout(tree)
    assert resolve(tree, "HEAD") == git("rev-parse", "HEAD", cwd=tree).strip()
    assert dirty_files(tree) == plain(tree) == []
    os.utime(tree / README, (1, 1))
    assert dirty_files(tree) == []
    write(tree, README, "mine\n")
    git("rm", "--quiet", "--cached", SCHEDULE, cwd=tree)
    assert sorted(dirty_files(tree)) == plain(tree) == sorted([README, SCHEDULE])
    git("reset", "--quiet", "--hard", cwd=tree)
    before = snapshot(tree)
    apply_series(tree, upstream.patches)
    assert identify(tree, read_versions(upstream.patches)).state is TreeState.APPLIED
    revert_series(tree, upstream.patches)
    assert snapshot(tree) == before


def crlf_clone(upstream, folder):
    clone(upstream.checkout, folder, "--config=core.autocrlf=true")
    assert b"\r\n" in (folder / ROUTER).read_bytes()
    return folder


def test_a_crlf_checkout_is_told_so(upstream, tmp_path):
    tree = crlf_clone(upstream, tmp_path / "crlf")
    files = [path for path in FILES if path != NEW]
    with refused(
        tree,
        f"{tree} is core_v9.1.0 with CRLF line ends in ",
        *files,
        "git config core.autocrlf false, then check out again",
    ):
        apply_series(tree, upstream.patches)
    # what the message says
    git("config", "core.autocrlf", "false", cwd=tree)
    subprocess.run(
        "git rm -r --cached --quiet . && git reset --quiet --hard", shell=True, cwd=tree, check=True
    )
    apply_series(tree, upstream.patches)


@pytest.mark.parametrize("files", [[ROUTER], [ROUTER, DISPATCHER]])
def test_a_few_crlf_files(upstream, files):
    for path in files:
        text = (upstream.package / path).read_bytes()
        (upstream.package / path).write_bytes(text.replace(b"\n", b"\r\n"))
    with refused(upstream.package, "CRLF line ends in", *files, "unpack it with LF"):
        apply_series(upstream.package, upstream.patches)
    write(upstream.package, SCHEDULE, "mine\n")
    with refused(
        upstream.package,
        f"\n  {ROUTER}: has CRLF line ends",
        f"\n  {SCHEDULE}: neither the base nor the patched file",
        "\nCRLF line ends: git config core.autocrlf false",
    ):
        apply_series(upstream.package, upstream.patches)


def test_other_files_may_have_crlf(upstream):
    """A checkout with core.autocrlf, of which the files of the series were given LF."""
    tree = upstream.checkout
    (tree / OTHER).write_bytes(b"other = 1\r\n")
    assert dirty_files(tree) == []
    (tree / OTHER).chmod(0o755)
    assert dirty_files(tree) == [OTHER]  # its mode is another
    (tree / OTHER).chmod(0o644)
    git("add", OTHER, cwd=tree)
    assert dirty_files(tree) == [OTHER]  # CRLF is what would be committed
    git("reset", "--quiet", cwd=tree)
    (tree / OTHER).write_bytes(b"other = 2\r\n")
    assert dirty_files(tree) == [OTHER]
    with refused(tree, OTHER, "commit or stash"):
        apply_series(tree, upstream.patches)
    (tree / OTHER).write_bytes(b"other = 1\r\n")
    apply_series(tree, upstream.patches)


@pytest.mark.parametrize("cone", ["--cone", "--no-cone", "--sparse-index"])
def test_a_sparse_checkout_is_told_so(upstream, cone):
    tree, left_out = upstream.checkout, [ROUTER, README]
    if cone == "--no-cone":
        git("sparse-checkout", "set", cone, "/*", f"!{README}", f"!{ROUTER}", cwd=tree)
    else:
        git("sparse-checkout", "set", "--cone", cone, "megatron/core/empty", cwd=tree)
    assert not (tree / ROUTER).exists()
    assert dirty_files(tree) == plain(tree) == []
    with refused(tree, f"{tree} is a sparse checkout of", *left_out, "git sparse-checkout disable"):
        apply_series(tree, upstream.patches)
    git("sparse-checkout", "disable", cwd=tree)
    apply_series(tree, upstream.patches)


def test_a_sparse_checkout_that_has_the_files_is_patched(upstream):
    git("sparse-checkout", "set", "--cone", "megatron/core", cwd=upstream.checkout)
    assert not (upstream.checkout / "tools").exists()
    apply_series(upstream.checkout, upstream.patches)


def test_a_deleted_file_is_not_left_out(upstream):
    (upstream.checkout / ROUTER).unlink()
    with refused(upstream.checkout, f"has uncommitted changes: {ROUTER};"):
        apply_series(upstream.checkout, upstream.patches)
