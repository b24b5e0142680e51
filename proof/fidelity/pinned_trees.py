"""`make trees`: which groups of patches apply to the trees that frameworks pin, and to releases.

    python -m proof.fidelity.pinned_trees --repo CLONE [--out docs/trees.json]

Each tree is checked out, patched and reverted; git must then see no change. The record, --out, has
the digest of each line's patches, so a test can tell that a record is older than the patches. The
table of docs/bumping.md shows the record. Exit status 0: every tree took the group r3, and was
restored; 1: a tree did not, or was not; 2: CLONE lacks a tree, and nothing was written.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keepers.clone import borrow, has_commit
from megatron_r3.patching.apply import apply_series, revert_series
from megatron_r3.patching.git import PatchingError, git
from megatron_r3.patching.record import series_digest
from megatron_r3.patching.series import read_series
from megatron_r3.patching.versions import Versions, patches_folder, read_versions
from proof.fidelity.trees import ROOT

RECORD = ROOT / "docs" / "trees.json"
PINS = {
    "NeMo-RL, by Megatron-Bridge 8c46dc42": "14346b65a2d0",
    "SkyRL": "71e418ea7d7b",
    "Megatron-Bridge": "2a75ac12c54b",
    "Megatron-Bridge 0.6": "cd4afffa6484",
    "slime, without its own patches": "1dcf0dafa884",
}
HEAD = "| tree | commit | line | groups | left out |\n|---|---|---|---|---|"


def main(argv: list[str] | None = None) -> int:
    """Try each tree, print a line for it, and write the record."""
    parser = argparse.ArgumentParser(prog="trees", description=__doc__.splitlines()[0])
    parser.add_argument("--repo", type=Path, required=True, help="a clone of Megatron-LM")
    parser.add_argument("--out", type=Path, default=RECORD, help="the JSON file to write")
    args = parser.parse_args(argv)
    versions, rows = read_versions(patches_folder()), []
    try:
        with tempfile.TemporaryDirectory(prefix="trees-") as folder:
            tree = borrow(args.repo, Path(folder) / "tree")
            for name, commit in trees_of(versions):
                if not has_commit(args.repo, commit):
                    raise PatchingError(
                        f"{args.repo} has no commit {commit} ({name}): git fetch it there"
                    )
                rows.append({"tree": name, **tried(tree, commit, versions)})
                print(row_of(rows[-1]), flush=True)
    except PatchingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "series": digests(versions),
        "trees": rows,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(row.get("reverted") for row in rows) else 1


def trees_of(versions: Versions) -> Iterator[tuple[str, str]]:
    """Name and commit of each tree: those that frameworks pin, then those of the release lines."""
    yield from PINS.items()
    for line in versions.lines:
        yield from ((tree.name, tree.commit) for tree in line.trees if tree.commit)


def digests(versions: Versions) -> dict[str, str]:
    """The digest of each line's patches."""
    return {line.name: series_digest(read_series(line.folder)) for line in versions.lines}


def tried(tree: Path, commit: str, versions: Versions) -> dict[str, Any]:
    """Patch and revert a commit; return its entry of the record, with `error` if that failed."""
    git(tree, "checkout", "--quiet", "--detach", "--force", commit)
    row: dict[str, Any] = {"commit": git(tree, "rev-parse", "HEAD")}
    try:
        status = apply_series(tree, versions.folder, unreleased=True).status
        whole = read_series(status.line.folder).groups
        row |= {"line": status.line.name, "groups": [*status.groups]}
        row["left_out"] = [name for name in whole if name not in row["groups"]]
        revert_series(tree, versions.folder)
        row["reverted"] = not git(tree, "status", "--porcelain", "--ignored")
    except PatchingError as error:
        row["error"] = str(error).splitlines()[0]
    return row


def row_of(row: dict[str, Any]) -> str:
    """The row of a tree in the table of docs/bumping.md."""
    if "error" in row:
        return f"| {row['tree']} | {row['commit'][:8]} | refused: {row['error']} | | |"
    back = "" if row["reverted"] else " (NOT REVERTED)"
    cells = (row["line"] + back, ", ".join(row["groups"]), ", ".join(row["left_out"]))
    return f"| {row['tree']} | {row['commit'][:8]} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
