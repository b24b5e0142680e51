"""What the files of a tree become, worked out beside it: the tree is not touched.

The files go into a temporary git directory with its own index, and the patches are applied there
one by one. After each, the blob ids must be those that the patch promises.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_r3.patching.errors import PatchingError
from megatron_r3.patching.index import Index
from megatron_r3.patching.series import FileChange, Patch
from megatron_r3.patching.tree import TreeStatus

__all__ = ["Computed", "compute", "run_series"]


@dataclass(frozen=True)
class Computed:
    """The files of a tree after an apply or a revert.

    Attributes:
        contents: of each file; None where there is none.
        blobs: the ids that each file went through, its first one included: what an entry of
            versions.toml says of a file whose base is not the one that the patches name.
    """

    contents: dict[str, bytes | None]
    blobs: dict[str, list[str | None]]


@dataclass(frozen=True)
class _Step:
    """One file of one patch, and its place in the file's chain of blobs."""

    change: FileChange
    place: int


def compute(status: TreeStatus, *, reverse: bool = False) -> Computed:
    """Apply what is not applied yet, or with `reverse` undo what is, last patch first.

    Files that are half way are taken from where they are. Files that the tree is known to lack
    are left out. Unknown files are tried from the first patch on and cannot be reverted.

    Raises:
        PatchFailed: a patch does not fit.
        PatchingError: a patch fits but does not give the file that it promises.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-r3-") as folder:
        index = Index(Path(folder))
        index.add(status.files)
        blobs = {path: [file.blob] for path, file in status.files.items()}
        for path, blob in run_series(index, status, reverse=reverse):
            blobs[path].append(blob)
        return Computed(index.contents(status.files), blobs)


def run_series(
    index: Index, status: TreeStatus, *, reverse: bool = False
) -> Iterator[tuple[str, str | None]]:
    """Apply to `index`, which holds the files of `status`, what is due; see `compute`.

    Yields after each patch its files, each with the blob id that it has now.
    """
    patches = list(_due(status, reverse))
    for number, patch, steps in reversed(patches) if reverse else patches:
        index.apply(number, patch, [step.change for step in steps], reverse)
        after = index.blobs()
        for path, place in ((step.change.path, step.place) for step in steps):
            promised = status.blobs[path][place if reverse else place + 1]
            if status.places[path] is not None and after.get(path) != promised:
                raise PatchingError(
                    f"{patch.file} is damaged: it does not give the {path} that is promised "
                    f"for {status.tree.name}; nothing was changed"
                )
            yield path, after.get(path)


def _due(status: TreeStatus, reverse: bool) -> Iterator[tuple[int, Patch, list[_Step]]]:
    """Each patch with something to do, its number from 1, and the files it has to do it to."""
    places: Counter[str] = Counter()
    for number, patch in enumerate(status.series.patches, 1):
        steps = []
        for change in patch.changes:
            step, here = _Step(change, places[change.path]), status.places[change.path]
            places[change.path] += 1
            if change.path in status.tree.absent or (reverse and here is None):
                continue
            if (step.place < (here or 0)) == reverse:
                steps.append(step)
        if steps:
            yield number, patch, steps
