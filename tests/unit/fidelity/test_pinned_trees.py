"""The record of `make trees` is of today's patches, and the docs say what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from fidelity.pinned_trees import HEAD, RECORD, digests, row_of, trees_of, tried
from megatron_r3.patching.versions import patches_folder, read_versions

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
    table = "\n".join([HEAD, *map(row_of, record["trees"])])
    page = (ROOT / "docs" / "bumping.md").read_text()
    assert f"on {record['date']} " in page
    assert f"\n\n{table}\n\n" in page
    pages = [ROOT / "docs" / "integrate.md", *(ROOT / "docs" / "frameworks").glob("*.md")]
    frameworks = "".join(page.read_text() for page in pages)
    for row in record["trees"]:
        if not row["tree"].startswith(("core_v", "main")):
            assert row["commit"][:8] in frameworks


def test_a_patch_that_changes_makes_the_record_old(tmp_path: Path) -> None:
    line = VERSIONS.lines[0]
    folder = tmp_path / line.name
    folder.mkdir()
    for file in line.folder.glob("*.patch"):
        (folder / file.name).write_bytes(file.read_bytes().replace(b"\n+", b"\n+ ", 1))
    changed = replace(VERSIONS, lines=(replace(line, folder=folder),))
    assert digests(changed)[line.name] != json.loads(RECORD.read_text())["series"][line.name]


def test_a_tree_that_is_refused_is_a_row(tmp_path: Path) -> None:
    import subprocess

    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "a.py").write_text("")
    for words in ("init -q", "add -A", "-c user.name=a -c user.email=a@b commit -q -m a"):
        subprocess.run(["git", "-C", str(tmp_path), *words.split()], check=True)
    row = {"tree": "mine", **tried(tmp_path, "HEAD", VERSIONS)}
    assert "| refused: " in row_of(row)
