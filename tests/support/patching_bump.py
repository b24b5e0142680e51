"""What the tests of bump share: upstream makes a release, and a bump to it stops or not."""

import pytest
from patching_upstream import LINE, OTHER, ROUTER, commit, git, snapshot, write

from keepers.bump import bump_line
from megatron_r3.patching.git import PatchingError

NEXT_TAG, NEXT = "core_v9.2.0", "core_r9.2.0"


def release(upstream, changes, tag=NEXT_TAG):
    """Upstream makes each of these changes (path: old, new; or None) and releases them."""
    tree = upstream.checkout
    for path, change in changes.items():
        if change is None:
            (tree / path).unlink()
        else:
            text = (tree / path).read_text() if (tree / path).exists() else ""
            assert change[0] in text
            write(tree, path, text.replace(*change) if change[0] else change[1])
        commit(tree, f"Change {path.rpartition('/')[2]}")
    git("tag", tag, cwd=tree)
    return git("rev-parse", tag, cwd=tree).strip()


def bump(upstream, new=NEXT_TAG, old=LINE, **arguments):
    work = upstream.patches.parent / "work"
    return bump_line(old, new, upstream.checkout, upstream.patches, **({"work": work} | arguments))


def stop(upstream, **arguments):
    """The lines of a bump that stops; it writes no patches."""
    before = snapshot(upstream.patches, mtimes=True)
    with pytest.raises(PatchingError) as error:
        bump(upstream, **arguments)
    assert snapshot(upstream.patches, mtimes=True) == before
    return str(error.value).splitlines()


def everything(repo):
    return {path: path.read_bytes() for path in repo.rglob("*") if path.is_file()}


CONFLICT = {OTHER: ("1", "2"), ROUTER: ("line 31\n", "line thirty-one\n")}


def resolve(work, path, old, new):
    text = (work / path).read_text()
    assert old in text
    (work / path).write_text(text.replace(old, new))
    git("add", "-u", cwd=work)
    git("am", "--continue", cwd=work)


def skip(work):
    git("am", "--skip", cwd=work)
