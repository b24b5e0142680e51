"""The checks of every release line. Each returns whether the tree passed, and details."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch

from keepers.export import reexport
from keepers.verify import verify_tree
from megatron_r3.patching.apply import apply_series, revert_series
from megatron_r3.patching.git import PatchingError
from megatron_r3.patching.series import read_series
from megatron_r3.patching.versions import KnownTree, Line
from proof.fidelity.cases import CASES, Case
from proof.fidelity.model_options import options, unread
from proof.fidelity.off import Weights, train_off
from proof.fidelity.record_replay import LAYOUTS, record_and_replay
from proof.fidelity.rig.rank_process import RankError
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.router_replay import use_router_replay
from proof.fidelity.table import Table, passed
from proof.fidelity.trees import has_loop, unpatched_copy

Result = tuple[bool | None, str]  # None: the tree lacks what is checked
NO_LOOP = None, "the tree has no megatron/training: PyPI has none up to 0.16"
C = TypeVar("C", bound="Copies")
QUICK = tuple(case for case in CASES if case.quick)

LAYOUTS_OFF = {
    "1 process": (1, ""),
    "EP2": (2, "--expert-model-parallel-size 2"),
    "EP2, all-gather": (2, "--expert-model-parallel-size 2 --moe-token-dispatcher-type allgather"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
}


class Copies:
    """An unpatched and a patched copy of one tree, and for each copy a process that imports it.

    Args:
        line: the release line whose patches are in the patched copy.
        name: what the tree is called.
        folder: where the copies are, in `unpatched` and `patched`.
        cases: the cases of the fidelity table that `replay` runs.
    """

    def __init__(self, line: Line, name: str, folder: Path, cases: Sequence[Case] = QUICK) -> None:
        self.line, self.name, self.folder, self.cases = line, name, folder, cases
        self.unpatched, self.patched = folder / "unpatched", folder / "patched"
        self._workers: dict[Path, TreeWorker] = {}
        self._open = ExitStack()

    def worker(self, tree: Path) -> TreeWorker:
        """The process that has imported this copy; the first call starts it."""
        if tree not in self._workers:
            worker = TreeWorker(tree, preload=["megatron.training"] if has_loop(tree) else [])
            self._workers[tree] = self._open.enter_context(worker)
        return self._workers[tree]

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()


class Checked(Copies):
    """Two copies of a tree of patches/versions.toml: `_applies` patches the second.

    Args:
        source: a git repository that holds the tree's files as `commit`.
        folder, cases: as for `Copies`.
    """

    def __init__(
        self,
        line: Line,
        tree: KnownTree,
        source: Path,
        commit: str,
        folder: Path,
        cases: Sequence[Case] = QUICK,
    ) -> None:
        super().__init__(line, tree.name, folder, cases)
        self.tree, self.source, self.commit = tree, source, commit
        self.patches = line.folder.parent
        for copy in (self.unpatched, self.patched):
            unpatched_copy(source, copy, commit)


def _applies(checked: Checked) -> Result:
    """Check that the series applies and reverts exactly; leave the second copy patched."""
    try:
        verified = verify_tree(checked.source, checked.line, checked.tree)
        before = files_and_modes(checked.patched)
        applied = apply_series(checked.patched, checked.patches, line=checked.line.name)
        patched = files_and_modes(checked.patched)
        if apply_series(checked.patched, checked.patches).files:
            return False, "a second apply changed files"
        revert_series(checked.patched, checked.patches)
        if files_and_modes(checked.patched) != before:
            return False, "a revert does not restore every file"
        apply_series(checked.patched, checked.patches)
    except PatchingError as error:
        return False, str(error)
    if verified is None or files_and_modes(checked.patched) != patched or patched == before:
        return False, (
            "the tree is not the one of patches/versions.toml, the patches change nothing in it, "
            "or applying them again after the revert gave other files"
        )
    return True, f"{verified.num_patches} patches, {len(applied.files)} files"


def files_and_modes(root: Path) -> dict[str, tuple[int, str]]:
    """Mode and digest of every file, by the file's path relative to `root`."""
    return {
        str(path.relative_to(root)): (
            path.stat().st_mode,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in root.rglob("*")
        if path.is_file()
    }


def _exports(checked: Checked) -> Result:
    """Check that patches committed on the tree and exported again are the same, byte for byte.

    A patch names the git ids of the files that it changes. If the tree has another version of such
    a file, the export of that patch has other ids and is not compared here: `_applies` has compared
    what the patch makes of the file.
    """
    try:
        series = read_series(checked.line.folder)
        again = reexport(checked.source, checked.commit, series, checked.tree)
    except PatchingError as error:
        return False, str(error)
    other_base = [
        patch.file.name
        for patch in series.patches
        if any(change.path in (checked.tree.blobs or {}) for change in patch.changes)
    ]
    same = {n: data for n, data in again.items() if n not in other_base}
    differ = [n for n, data in same.items() if (checked.line.folder / n).read_bytes() != data]
    skipped = len(series.patches) - len(again)
    detail = (
        f"{len(same)} patches, {skipped} without files in this tree, {len(again) - len(same)} of "
        "files with another version"
    )
    return bool(again) and not differ, f"differ: {', '.join(differ)}" if differ else detail


def _options(checked: Checked) -> Result:
    """Check that each option that may change a model is in a list that `model_options.py` reads."""
    if names := unread(checked.unpatched):
        return False, f"options in no list of proof/fidelity/model_options.py: {', '.join(names)}"
    return True, f"{len({*options(checked.unpatched)})} options"


def off(checked: Copies) -> Result:
    """Check that without our options, and with replay hidden, both trees train to equal weights."""
    if not has_loop(checked.patched):
        return NO_LOOP
    unpatched, patched = checked.worker(checked.unpatched), checked.worker(checked.patched)
    for name, (ranks, arguments) in LAYOUTS_OFF.items():
        try:
            want = unpatched.run(train_off, ranks, arguments, timeout_s=180)
            got = patched.run(train_off, ranks, arguments, timeout_s=180)
        except RankError as error:
            return False, f"{name}: {error}"
        if not all(_equal(one, other) for one, other in zip(want, got, strict=True)):
            return False, f"{name}: other weights than on the unpatched tree"
        if any(_equal((before,), (after,)) for before, after in got):
            return False, f"{name}: the same weights after the training: nothing was trained"
    return True, ", ".join(LAYOUTS_OFF)


def _equal(one: Sequence[Weights], other: Sequence[Weights]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def router_replay(checked: Copies) -> Result:
    """Check that code that was written for upstream's RouterReplay runs on the patched tree."""
    if not has_loop(checked.patched):
        return NO_LOOP
    try:
        checked.worker(checked.patched).run(use_router_replay, 1, timeout_s=180)
    except RankError as error:
        return False, str(error)
    return True, "records, replays, recomputes"


def replay(checked: Copies) -> Result:
    """Check that cases of the fidelity table pass, or `record_replay` if the tree has no loop."""
    if not has_loop(checked.patched):
        return record_replay(checked)
    table = Table(checked.worker(checked.patched), checked.folder, checked.name)
    cases = [case for case in checked.cases if case.runs_on(checked.patched, checked.line.name)]
    rows = [table.row(case) for case in cases]
    failed = [f"{row['case']}: {row.get('error', row)}" for row in rows if not passed(row)]
    detail = ", ".join(case.name for case in cases)
    return bool(cases) and not failed, "\n".join(failed) or f"{len(cases)} cases: {detail}"


def record_replay(checked: Copies) -> Result:
    """Check that a replay gives bitwise the recorded pass, and that wrong routes do not."""
    for name, (ranks, more) in LAYOUTS.items():
        try:
            worker = checked.worker(checked.patched)
            wrong = worker.run(record_and_replay, ranks, more, timeout_s=180)
        except RankError as error:
            return False, f"{name}: {error}"
        if any(wrong):
            return False, f"{name}: claims that failed: {wrong}"
    return True, ", ".join(LAYOUTS)


CHECKS: dict[str, Callable[[Checked], Result]] = {
    "apply, revert": _applies,
    "export": _exports,
    "options": _options,
    "off": off,
    "RouterReplay": router_replay,
    "replay": replay,
}
