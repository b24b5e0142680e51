"""A tree of somebody else: git does not run in it, so nothing that its repository brings is run."""

import os
import shutil
import subprocess

import pytest
from patching_upstream import LINE, OTHER, ROUTER, git, run_cli, snapshot, write

from megatron_r3.patching.apply import apply_series, revert_series

# Each setting runs a program where some git command asks for it: EVIL, which writes a marker.
_SETTINGS = """
core.fsmonitor = EVIL
diff.external = EVIL
extensions.partialClone = origin
filter.evil.clean = EVIL; cat
filter.evil.smudge = EVIL; cat
remote.origin.promisor = true
remote.origin.uploadpack = EVIL
remote.origin.url = ext::EVIL
""".strip().splitlines()
# the git that a command finds first: it notes where it is run, and for which repository
_NOTING = """#!/bin/sh
echo "$PWD $GIT_DIR $GIT_WORK_TREE $*" >>'{log}'
exec '{git}' "$@"
"""


@pytest.fixture
def hostile(upstream, tmp_path):
    """The checkout with every setting above, and the marker that a program of it would leave."""
    tree, marker = upstream.checkout, tmp_path / "marker"
    write(tmp_path, "evil", f"#!/bin/sh\ntouch '{marker}'\nexit 1\n", executable=True)
    for line in _SETTINGS:
        name, value = line.replace("EVIL", str(tmp_path / "evil")).split(" = ")
        git("config", name, value, cwd=tree)
    git("config", "core.repositoryFormatVersion", "1", cwd=tree)
    write(tree, ".git/info/attributes", "* filter=evil diff=evil\n")
    os.utime(tree / ROUTER, (1, 1))  # git would have to look into it
    return marker


def test_no_command_runs_git_in_the_tree(upstream, tmp_path, hostile):
    tree, log = upstream.checkout, tmp_path / "log"
    program = _NOTING.format(log=log, git=shutil.which("git"))
    write(tmp_path / "bin", "git", program, executable=True)
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    write(tree, OTHER, "other = 2\n")
    router = (tree / ROUTER).read_text()
    for text in (router, router.replace("line 20\n", "mine\n"), router.replace("29\n", "92\n")):
        (tree / ROUTER).write_text(text)
        for words in (["status"], ["apply", "--unreleased"], ["status"], ["revert"]):
            command, *more = words
            done = run_cli(command, tree, "--patches", upstream.patches, *more, env=env, cwd=tree)
            assert done.returncode == 0 or text != router, done.stderr
    assert not hostile.exists()
    runs = log.read_text().splitlines()
    assert [run for run in runs if " apply " in run]  # in a folder of ours
    assert [run for run in runs if str(tree) in run] == []
    subprocess.run(["git", "status"], cwd=tree, capture_output=True, check=False)
    assert hostile.exists()  # the control: plain git obeys


def test_a_program_named_git_in_the_tree_is_not_git(upstream, tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    write(upstream.checkout, "git", f"#!/bin/sh\ntouch '{marker}'\n", executable=True)
    monkeypatch.setenv("PATH", f".:{os.environ['PATH']}")
    monkeypatch.chdir(upstream.checkout)
    apply_series(upstream.checkout, upstream.patches)
    assert not marker.exists()
    subprocess.run(["git", "status"], capture_output=True, check=False)
    assert marker.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
def test_root_applies_to_the_tree_of_another_user(upstream, hostile):
    tree, stranger = upstream.checkout, 65534
    before = snapshot(tree)
    for path in (tree, *tree.rglob("*")):
        os.chown(path, stranger, stranger, follow_symlinks=False)
    apply_series(tree, upstream.patches, line=LINE)
    assert (tree / ROUTER).stat().st_uid == stranger
    revert_series(tree, upstream.patches)
    assert snapshot(tree) == before


@pytest.mark.parametrize("broken", ["HEAD", "config", "index"])
def test_a_broken_repository_does_not_matter(upstream, broken):
    (upstream.checkout / ".git" / broken).write_text("[not\x00 what it was")
    apply_series(upstream.checkout, upstream.patches)
    revert_series(upstream.checkout, upstream.patches)
