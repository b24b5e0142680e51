"""The record of `make trees` is of today's patches, and the docs say what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_r3.patching.git import git, new_repository
from megatron_r3.patching.versions import patches_folder, read_versions
from proof.fidelity import pinned_trees
from proof.fidelity.pinned_trees import HEAD, PINS, RECORD, digests, main, row_of, trees_of, tried

ROOT = Path(__file__).parents[3]
VERSIONS = read_versions(patches_folder())


def test_the_record_is_of_these_patches_and_of_these_trees() -> None:
    """It is made anew by `make trees REPO=CLONE` when a patch changes."""
    record = json.loads(RECORD.read_text())
    assert record["series"] == digests(VERSIONS)
    names = [(row["tree"], row["commit"]) for row in record["trees"]]
    for (name, commit), (there, known) in zip(names, trees_of(VERSIONS), strict=True):
        assert (name, commit[: len(known)]) == (there, known)
    assert all(row["reverted"] and "r3" in row["groups"] for row in record["trees"])


def test_the_docs_have_the_table_and_name_the_groups() -> None:
    record = json.loads(RECORD.read_text())
    pinned, released = record["trees"][: len(PINS)], record["trees"][len(PINS) :]
    assert [row["left_out"] for row in released] == [[]] * len(released)  # a sentence says so
    table = "\n".join([HEAD, *map(row_of, pinned)])
    page = (ROOT / "docs" / "bumping.md").read_text()
    assert f"on {record['date']} " in page
    assert f"\n\n{table}\n\n" in page
    pages = [ROOT / "docs" / "integrate.md", *(ROOT / "docs" / "frameworks").glob("*.md")]
    frameworks = "".join(page.read_text() for page in pages)
    for row in pinned:
        assert row["commit"][:8] in frameworks


def test_a_patch_that_changes_makes_the_record_old(tmp_path: Path) -> None:
    line = VERSIONS.lines[0]
    folder = tmp_path / line.name
    folder.mkdir()
    for file in line.folder.glob("*.patch"):
        (folder / file.name).write_bytes(file.read_bytes().replace(b"\n+", b"\n+ ", 1))
    changed = replace(VERSIONS, lines=(replace(line, folder=folder),))
    assert digests(changed)[line.name] != json.loads(RECORD.read_text())["series"][line.name]


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A tree of two files, which is of no line."""
    made = new_repository(tmp_path / "tree")
    (made / "megatron" / "core").mkdir(parents=True)
    (made / "megatron" / "core" / "a.py").write_text("")
    git(made, "add", "-A")
    git(made, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "a")
    return made


def test_a_tree_that_is_refused_is_a_row(repo: Path) -> None:
    row = {"tree": "mine", **tried(repo, "HEAD", VERSIONS)}
    assert "| refused: " in row_of(row)


@pytest.mark.parametrize("left", ["", "a.rej"])
def test_a_tree_that_does_not_come_back_is_seen(repo, monkeypatch, left):
    status = SimpleNamespace(line=VERSIONS.lines[0], groups=("r3",))
    done = SimpleNamespace(status=status)
    monkeypatch.setattr(pinned_trees, "apply_series", lambda *_, **__: done)

    def revert(tree: Path, _: Path) -> None:
        if left:
            (tree / left).write_text("")

    monkeypatch.setattr(pinned_trees, "revert_series", revert)
    row = {"tree": "mine", **tried(repo, "HEAD", VERSIONS)}
    assert row["reverted"] == (not left)
    assert ("(NOT REVERTED)" in row_of(row)) == bool(left)


def test_a_clone_that_lacks_a_tree_is_one_line(repo, tmp_path, capsys):
    for clone, words in ((repo, "git fetch it there"), (tmp_path, "is no git repository")):
        assert main(["--repo", str(clone), "--out", str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {clone} ")
        assert words in said
        assert not (tmp_path / "out").exists()
