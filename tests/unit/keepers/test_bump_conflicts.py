"""A bump that stops: what is said, what lies in the checkout, and how it goes on."""

import os
import re
import subprocess

import pytest
from patching_bump import CONFLICT, NEXT, NEXT_TAG, bump, release, resolve, stop
from patching_upstream import (
    DISPATCHER,
    NEW,
    ROUTER,
    TAG,
    commit,
    git,
    snapshot,
    write,
)


def test_a_conflict_gives_five_lines_and_a_checkout_to_work_in(upstream, tmp_path):
    release(upstream, CONFLICT)
    lines, work = stop(upstream), tmp_path / "work"
    assert len(lines) == 5
    assert lines[0] == "patch 2 of 4 does not apply: 0002-Bind-the-hook-to-the-microbatch.patch"
    assert lines[1] == f"  at: {ROUTER}:29"
    assert lines[2] == "  subject: Bind the hook to the microbatch"
    assert lines[3].startswith("  upstream commits: ")
    assert lines[3].endswith(f"Change router.py since {TAG}")
    assert "Change other.py" not in lines[3]
    assert lines[4].startswith(f"  next: cd {work}; git am --show-current-patch=diff | ")
    assert "needs no such patch, git am --skip; then the same bump again" in lines[4]
    assert git("status", "--porcelain", cwd=work) == ""
    assert git("log", "--format=%s", f"{NEXT_TAG}..", cwd=work) == "Ask the hook\n"

    write(work, ROUTER, (work / ROUTER).read_text() + "half done\n")
    before = snapshot(work, mtimes=True)
    assert stop(upstream) == lines
    assert snapshot(work, mtimes=True) == before  # what a person has begun stays

    with pytest.raises(subprocess.CalledProcessError):
        git("am", "--continue", cwd=work)  # nobody has said that this is all
    git("checkout", "--quiet", "-f", cwd=work)
    apply = "git am --show-current-patch=diff | git apply --3way"
    assert apply in lines[4]
    env = {
        **os.environ,
        "GIT_COMMITTER_NAME": "A Person",
        "GIT_COMMITTER_EMAIL": "person@example.com",
    }
    done = subprocess.run(apply, shell=True, cwd=work, env=env, capture_output=True, check=False)
    text = (work / ROUTER).read_text()
    assert text.count("<<<<<<< ours\n") == 1, done.stderr
    (conflict,) = re.findall(r"<<<<<<< ours\n.*>>>>>>> theirs\n", text, re.S)
    resolve(work, ROUTER, conflict, "line thirty-one\nbind(hook, new)\n")
    done = bump(upstream)
    assert done.names == tuple(file.name for file in upstream.series)
    text = (upstream.patches / NEXT / upstream.series[1].name).read_text()
    assert "+bind(hook, new)\n" in text
    assert "+    return bind(forward)()\n" in text  # of a file where the patch fits
    assert "From: A Person" in text


@pytest.mark.parametrize(
    ("changes", "path", "number"),
    [({DISPATCHER: None}, DISPATCHER, 1), ({NEW: ("", "theirs\n")}, NEW, 3)],
)
def test_a_file_that_upstream_removed_or_added(upstream, tmp_path, changes, path, number):
    release(upstream, changes)
    lines = stop(upstream)
    assert lines[0].startswith(f"patch {number} of 4 does not apply")
    assert f"  at: {path}: " in lines[1]


def test_an_interrupted_am_goes_on(upstream, tmp_path):
    release(upstream, CONFLICT)
    stop(upstream)
    work = tmp_path / "work"
    git("reset", "--quiet", "--hard", cwd=work)
    write(work, ROUTER, (work / ROUTER).read_text().replace("line thirty-one", "line 31"))
    commit(work, "Make it fit")
    lines = stop(upstream)
    assert lines[1].endswith("the patch fits, but git am was interrupted")
    assert lines[4] == f"  next: cd {work}; git am, to continue it; then the same bump again"
    assert git("status", "--porcelain", "--untracked-files=no", cwd=work) == ""
