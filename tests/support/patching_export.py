"""What the tests of export share: an upstream whose patches are commits, and what is refused."""

import pytest
from patching_upstream import BODY, LINE, OTHER, TAG, commit, git, make_upstream, snapshot, write

from keepers.export import export_series
from megatron_r3.patching.git import PatchingError

SECOND = "core_r9.2.0"


def committed_upstream(tmp_path):
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


def numbers(upstream, line=LINE):
    return [int(file.name[:4]) for file in sorted((upstream.patches / line).glob("*.patch"))]
