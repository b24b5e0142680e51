"""A bump that stops: what is said, what lies in the checkout, and how it goes on."""

import subprocess

import pytest
from patching_bump import CONFLICT, NEXT, NEXT_TAG, bump, release, resolve, stop
from patching_upstream import (
    DISPATCHER,
    NEW,
    ROUTER,
    SCHEDULE,
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
    assert lines[4].startswith(f"  next: cd {work}; resolve (hunks that failed: {ROUTER}.rej), ")
    assert "needs no such patch, git checkout -f, git am --skip" in lines[4]
    assert "bind(hook)" in (work / f"{ROUTER}.rej").read_text()
    assert "bind(forward)" in (work / SCHEDULE).read_text()  # the hunk that fits
    assert git("log", "--format=%s", f"{NEXT_TAG}..", cwd=work) == "Ask the hook\n"

    write(work, ROUTER, (work / ROUTER).read_text() + "half done\n")
    before = snapshot(work, mtimes=True)
    assert stop(upstream) == lines
    assert snapshot(work, mtimes=True) == before  # what a person has begun stays

    with pytest.raises(subprocess.CalledProcessError):
        git("am", "--continue", cwd=work)  # nobody has said that this is all
    resolve(work, ROUTER, "line 30\n", "line 30\nbind(hook, new)\n")
    done = bump(upstream)
    assert done.names == tuple(file.name for file in upstream.series)
    text = (upstream.patches / NEXT / upstream.series[1].name).read_text()
    assert "+bind(hook, new)\n" in text
    assert "From: A Person" in text


def test_an_older_release_lacks_commits(upstream):
    """The line of a release that came before: nothing was added there, things are missing."""
    git("checkout", "--quiet", "--orphan", "older", cwd=upstream.checkout)
    text = (upstream.checkout / ROUTER).read_text()
    write(upstream.checkout, ROUTER, text.replace("line 31\n", "thirty-one\n"))
    commit(upstream.checkout, "Older")
    git("tag", NEXT_TAG, cwd=upstream.checkout)
    write(upstream.checkout, ROUTER, text)
    versions = upstream.patches / "versions.toml"
    base = git("rev-parse", TAG, cwd=upstream.checkout).strip()
    versions.write_text(versions.read_text().replace(base, commit(upstream.checkout, "Newer")))
    lines = stop(upstream)
    assert lines[3].startswith(f"  upstream commits: none since {TAG}, which has ")
    assert lines[3].endswith(f"Newer since {NEXT_TAG}")


@pytest.mark.parametrize(
    ("changes", "path", "number"),
    [({DISPATCHER: None}, DISPATCHER, 1), ({NEW: ("", "theirs\n")}, NEW, 3)],
)
def test_a_file_that_upstream_removed_or_added(upstream, tmp_path, changes, path, number):
    release(upstream, changes)
    lines = stop(upstream)
    assert lines[0].startswith(f"patch {number} of 4 does not apply")
    assert f"  at: {path}: " in lines[1]
    assert f"(hunks that failed: {path}.rej)" in lines[4]
    assert "diff --git" in (tmp_path / "work" / f"{path}.rej").read_text()


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
