"""A repository of somebody else: nothing that it brings is run, whatever its configuration says.

Each setting below makes some git command run a program. The program writes a file, the marker; no
command of this project may leave that file behind. Plain git, in the same repository, does.
"""

import contextlib
import os
import subprocess

import pytest
from patching_bump import NEXT_TAG, release
from patching_upstream import (
    LINE,
    OTHER,
    ROUTER,
    TAG,
    commit,
    git,
    run_cli,
    snapshot,
    write,
)

from megatron_r3.patching.apply import apply_series, revert_series
from megatron_r3.patching.fetch import clone_tree
from megatron_r3.patching.git import PatchingError
from megatron_r3.patching.versions import KnownTree

STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")

# each runs a program where git asks for it; EVIL stands for the program
_SETTINGS = """
alias.am = !EVIL
alias.rev-parse = !EVIL
alias.status = !EVIL
core.alternateRefsCommand = EVIL
core.askPass = EVIL
core.editor = EVIL
core.fsmonitor = EVIL
core.gitProxy = EVIL
core.hooksPath = HOOKS
core.pager = EVIL
core.sshCommand = EVIL
credential.helper = !EVIL
diff.evil.command = EVIL
diff.evil.textconv = EVIL
diff.external = EVIL
diff.trustExitCode = false
extensions.partialClone = origin
filter.evil.clean = EVIL; cat
filter.evil.process = EVIL
filter.evil.smudge = EVIL; cat
filter.evil.required = true
gpg.program = EVIL
gpg.ssh.program = EVIL
log.showSignature = true
merge.evil.driver = EVIL
merge.tool = evil
mergetool.evil.cmd = EVIL
pager.log = EVIL
pager.rev-list = EVIL
pager.status = EVIL
protocol.allow = always
protocol.ext.allow = always
remote.origin.promisor = true
remote.origin.receivepack = EVIL
remote.origin.uploadpack = EVIL
remote.origin.url = ext::EVIL
sequence.editor = EVIL
submodule.recurse = true
trailer.evil.command = EVIL
uploadpack.packObjectsHook = EVIL
url.ext::EVIL.insteadOf = /
""".strip().splitlines()
_PATTERNS = "* filter=evil diff=evil merge=evil\n"


def make_hostile(tree, marker, how):
    """Give the checkout `tree` every setting above; the marker is written where one is obeyed.

    Args:
        how: config (in it), include (in a file that it includes), worktree (in the work tree's).
    """
    folder = marker.parent / "evil"
    program = folder / "program"
    write(folder, "program", f"#!/bin/sh\nid -un >>'{marker}'\nexit 1\n", executable=True)
    for hook in ("post-checkout", "applypatch-msg", "pre-commit", "post-index-change"):
        write(folder, f"hooks/{hook}", program.read_text(), executable=True)
        write(tree, f".git/hooks/{hook}", program.read_text(), executable=True)
    target = {"config": "config", "include": "included", "worktree": "config.worktree"}[how]
    for line in _SETTINGS:
        name, value = line.split(" = ")
        name, value = (
            text.replace("EVIL", str(program)).replace("HOOKS", str(folder / "hooks"))
            for text in (name, value)
        )
        git("config", "--file", str(tree / ".git" / target), name, value, cwd=tree)
    git("config", "core.repositoryFormatVersion", "1", cwd=tree)
    if how == "include":
        git("config", "include.path", "included", cwd=tree)
    if how == "worktree":
        git("config", "extensions.worktreeConfig", "true", cwd=tree)
    write(tree, ".git/info/attributes", _PATTERNS)
    os.utime(tree / ROUTER, (1, 1))  # git has to look into it
    os.utime(tree / OTHER, (1, 1))


def obeyed(tree, *command):
    """Run plain git in a hostile tree, as a person would."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    config = ("-c", "safe.directory=*")
    subprocess.run(["git", *config, *command], cwd=tree, env=env, capture_output=True, check=False)


def commands(upstream, clone, work):
    """Every command that reads a checkout or a clone, with its arguments."""
    patches = ("--patches", upstream.patches)
    return {
        "status": ("status", clone, *patches),
        "apply": ("apply", clone, *patches),
        "revert": ("revert", clone, *patches),
        "verify": ("verify", clone, *patches),
        "check": ("export", clone, "--check", *patches),
        "bump": ("bump", LINE, NEXT_TAG, "--repo", clone, "--work", work, *patches),
        "fetch": ("megatron", "--source", "git", "--repo", clone, "--out", work.parent, *patches),
    }


@pytest.mark.parametrize("how", ["config", "include", "worktree"])
def test_nothing_of_a_hostile_repository_is_run(upstream, tmp_path, how):
    release(upstream, {OTHER: ("1", "2")})
    git("checkout", "--quiet", "--detach", TAG, cwd=upstream.checkout)
    marker = tmp_path / "marker"
    make_hostile(upstream.checkout, marker, how)
    outcomes = {}
    for name, words in commands(upstream, upstream.checkout, tmp_path / "out/work").items():
        outcomes[name] = run_cli(*words, cwd=upstream.checkout)
        assert not marker.exists(), (name, marker.read_text())
    # the commands did their work: had they refused, they could not have run anything
    assert {name: done.stderr for name, done in outcomes.items() if done.returncode} == {}
    obeyed(upstream.checkout, "status")
    assert marker.exists()  # the control: plain git obeys


def test_a_failing_patch_runs_nothing(upstream, tmp_path):
    """Its five lines come from git log, and from objects that a partial clone would fetch."""
    text = (upstream.checkout / ROUTER).read_text()
    write(upstream.checkout, ROUTER, text.replace("line 29\n", "line twenty-nine\n"))
    commit(upstream.checkout, "Change the router")
    marker = tmp_path / "marker"
    make_hostile(upstream.checkout, marker, "config")
    with pytest.raises(PatchingError, match="Change the router since"):
        apply_series(upstream.checkout, upstream.patches)
    assert not marker.exists()
    obeyed(upstream.checkout, "log", "-1", "-p", "--ext-diff")
    assert marker.exists()


def test_a_missing_object_is_not_fetched(upstream, tmp_path):
    """A partial clone asks its remote for it, with the program that the remote names."""
    marker = tmp_path / "marker"
    make_hostile(upstream.checkout, marker, "config")
    tree = git("rev-parse", "HEAD^{tree}", cwd=upstream.checkout).strip()
    (upstream.checkout / ".git/objects" / tree[:2] / tree[2:]).unlink()
    with pytest.raises(PatchingError, match=f"for {upstream.checkout}: "):
        apply_series(upstream.checkout, upstream.patches)
    assert not marker.exists()
    obeyed(upstream.checkout, "cat-file", "-e", tree)
    assert marker.exists()


def test_a_program_named_git_in_the_tree_is_not_git(upstream, tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    write(upstream.checkout, "git", f"#!/bin/sh\ntouch '{marker}'\n", executable=True)
    monkeypatch.setenv("PATH", f".:{os.environ['PATH']}")
    apply_series(upstream.checkout, upstream.patches)
    assert not marker.exists()
    subprocess.run(["git", "status"], cwd=upstream.checkout, capture_output=True, check=False)
    assert marker.exists()


def give(folder, user):
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, user, follow_symlinks=False)


@as_root
def test_root_applies_to_the_tree_of_another_user(upstream, tmp_path):
    """And to one whose git nobody has called safe."""
    before = snapshot(upstream.checkout)
    marker = tmp_path / "marker"
    make_hostile(upstream.checkout, marker, "config")
    give(upstream.checkout, STRANGER)
    plain = subprocess.run(
        ["git", "status"],
        cwd=upstream.checkout,
        env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "dubious ownership" in plain.stderr  # git itself refuses
    apply_series(upstream.checkout, upstream.patches)
    assert (upstream.checkout / ROUTER).stat().st_uid == STRANGER
    revert_series(upstream.checkout, upstream.patches)
    assert snapshot(upstream.checkout) == before
    assert not marker.exists()


@as_root
def test_a_commit_is_fetched_from_the_repository_of_another_user(upstream, tmp_path):
    marker = tmp_path / "marker"
    make_hostile(upstream.checkout, marker, "config")
    base = git("rev-parse", TAG, cwd=upstream.checkout).strip()
    give(upstream.checkout, STRANGER)
    for number, url in enumerate((str(upstream.checkout), f"file://{upstream.checkout}")):
        clone_tree(KnownTree(TAG, commit=base), url, tmp_path / f"fetched{number}")
        assert (tmp_path / f"fetched{number}" / ROUTER).exists()
    assert not marker.exists()


@as_root
def test_a_bump_does_not_go_on_in_the_folder_of_another_user(upstream, tmp_path):
    """There git am runs with the configuration that is there."""
    release(upstream, {ROUTER: ("line 31\n", "line thirty-one\n")})
    words = commands(upstream, upstream.checkout, tmp_path / "work")["bump"]
    assert "does not apply" in run_cli(*words).stderr
    give(tmp_path / "work", STRANGER)
    assert run_cli(*words).stderr == (
        f"error: {tmp_path / 'work'} belongs to another user: choose another --work\n"
    )


@pytest.mark.parametrize("broken", ["HEAD", "config", "objects"])
def test_a_broken_repository_is_no_checkout(upstream, broken):
    path = upstream.checkout / ".git" / broken
    if path.is_dir():
        path.rename(path.with_name("moved"))
    else:
        path.write_text("[not\x00 what it was")
    apply_series(upstream.checkout, upstream.patches)
    with contextlib.suppress(FileNotFoundError):
        assert path.read_text() == "[not\x00 what it was"
