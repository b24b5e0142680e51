"""Starting a release line from another one: a clean bump, conflicts, and what is in the way."""

import pytest
from patching_bump import CONFLICT, NEXT, NEXT_TAG, bump, everything, release, skip, stop
from patching_upstream import LINE, OTHER, ROUTER, git, refused, snapshot, write

from keepers.export import export_series
from keepers.patches import main
from keepers.verify import check_rules, verify_repo
from megatron_r3.patching.versions import read_versions

# --- a bump without conflicts


def test_a_clean_bump(upstream):
    new = release(upstream, {ROUTER: ("line 1\n", "line one\n"), OTHER: ("1", "2")})
    before, patches = everything(upstream.checkout), snapshot(upstream.patches)
    text = (upstream.patches / "versions.toml").read_text()
    done = bump(upstream)
    assert everything(upstream.checkout) == before  # no worktree, no branch, no object
    assert (done.line, done.again, done.left_out) == (NEXT, False, ())
    assert done.names == tuple(file.name for file in upstream.series)
    assert (upstream.patches / "versions.toml").read_text() == (
        f"""{text}
[lines."{NEXT}"]
python = ">=3.10"
image = "some/image:1"
status = "new"

[[lines."{NEXT}".trees]]
name = "{NEXT_TAG}"
commit = "{new}"
"""
    )
    after = snapshot(upstream.patches)
    assert {name: after[name] for name in patches if name != "versions.toml"} == {
        name: patches[name] for name in patches if name != "versions.toml"
    }
    versions = read_versions(upstream.patches)
    assert check_rules(versions) == []
    assert all(c.verified for c in verify_repo(upstream.checkout, versions) if c.tree.commit)
    work = upstream.patches.parent / "work"
    assert export_series(work, upstream.patches, check=True).folder == upstream.patches / NEXT


def test_again(upstream):
    release(upstream, {OTHER: ("1", "2")})
    first = bump(upstream)
    before = snapshot(upstream.patches, mtimes=True)
    again = bump(upstream)
    assert again.again
    assert again.names == first.names
    (upstream.patches.parent / "work").rename(upstream.patches.parent / "gone")
    assert bump(upstream).again
    assert not (upstream.patches.parent / "work").exists()
    assert snapshot(upstream.patches, mtimes=True) == before


# --- what is in the way


def test_a_line_is_never_overwritten(upstream, tmp_path):
    release(upstream, {OTHER: ("1", "2")})
    with refused(upstream.patches, "is there already", LINE, "--name"):
        bump(upstream, line=LINE)
    assert not (tmp_path / "work").exists()
    write(upstream.patches, f"{NEXT}/0001-Mine.patch", "mine\n")
    with refused(
        upstream.patches, str(upstream.patches / NEXT), "not overwritten", "move that folder away"
    ):
        bump(upstream)
    (upstream.patches / NEXT / "0001-Mine.patch").unlink()
    bump(upstream)
    work = tmp_path / "work"
    write(work, OTHER, "other = 3\n")
    git("add", "--all", cwd=work)
    git("commit", "--quiet", "--amend", "--no-edit", cwd=work)
    with refused(upstream.patches, "not overwritten", f"make export MEGATRON={work} LINE={NEXT}"):
        bump(upstream)


def test_a_work_folder_that_is_something_else(upstream, tmp_path):
    release(upstream, {OTHER: ("1", "2")})
    release(upstream, {OTHER: ("2", "3")}, "core_v9.3.0")
    bump(upstream)
    for work in (upstream.package, upstream.checkout, tmp_path / "work", tmp_path / "work/.git"):
        with refused(work, "is not the checkout of this bump", str(work)):
            bump(upstream, new="core_v9.3.0", work=work)
    (tmp_path / "file").write_text("mine\n")
    with refused(tmp_path, "is not the checkout of this bump"):
        bump(upstream, new="core_v9.3.0", work=tmp_path / "file")
    (tmp_path / "empty").mkdir()
    bump(upstream, new="core_v9.3.0", work=tmp_path / "empty")


def test_uncommitted_changes_in_the_work_folder(upstream, tmp_path):
    release(upstream, CONFLICT)
    stop(upstream)
    skip(tmp_path / "work")
    write(tmp_path / "work", OTHER, "mine\n")
    with refused(tmp_path, OTHER, "uncommitted changes"):
        bump(upstream)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"new": "core_v9.9.9"}, "has no commit 'core_v9.9.9'"),
        ({"new": "--all"}, "has no commit '--all'"),
        ({"old": "core_r1"}, "core_r1 is no release line"),
        ({"new": "HEAD"}, "give --name"),
        ({"line": "../elsewhere"}, "is no name for a release line"),
        ({"line": ".hidden"}, "is no name for a release line"),
    ],
)
def test_arguments_that_are_wrong(upstream, tmp_path, arguments, message):
    release(upstream, {OTHER: ("1", "2")})
    with refused(tmp_path, message):
        bump(upstream, **arguments)


# --- the command


def test_the_command(upstream, tmp_path, capsys, monkeypatch):
    release(upstream, CONFLICT)
    monkeypatch.chdir(tmp_path)
    repo = str(upstream.checkout)
    arguments = ["bump", LINE, NEXT_TAG, "--repo", repo, "--patches", str(upstream.patches)]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: patch 2 of 4 does not apply")
    work = tmp_path / "build/bump" / NEXT
    skip(work)
    assert main(arguments) == 0
    first, left_out, following = capsys.readouterr().out.splitlines()
    assert first == f"{NEXT} is new, from {LINE}: 3 patches in {upstream.patches / NEXT}"
    assert left_out == f"patches of {LINE} that {NEXT} lacks: {upstream.series[1].name}"
    assert following == f"next: make verify REPO={repo} LINE={NEXT}, then make matrix"
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith(f"{NEXT} was there already: 3 patches")
    assert main(["verify", repo, "--line", NEXT, "--patches", str(upstream.patches)]) == 0
