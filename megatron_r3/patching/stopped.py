"""Where git am stopped in the checkout of a bump: what a person needs to go on."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

from megatron_r3.patching.cleanroom import git_path, has_commit, resolve
from megatron_r3.patching.conflict import five_lines, upstream_commits
from megatron_r3.patching.dirty import dirty_files
from megatron_r3.patching.git import run_git
from megatron_r3.patching.index import Index, PatchFailed
from megatron_r3.patching.series import Patch, Series
from megatron_r3.patching.workplace import Job

__all__ = ["explain_stop"]


def explain_stop(work: Path, job: Job, series: Series, repo: Path) -> str:
    """The five lines of the patch that git am waits for in `work`.

    Where nobody has begun to resolve it, its hunks that fit are put into the files, and the others
    beside them, as git apply --reject does.
    """
    number = int((git_path(work, "rebase-apply") / "next").read_text())
    patch = series.patches[number - 1]
    failures = _failures(work, number, patch)
    if failures:
        if not dirty_files(work):
            _reject(work, series, patch, list(failures))
        failed = next(iter(failures.values()))
        following = _next_command(work, job, patch)
    else:
        path = patch.changes[0].path
        failed = PatchFailed(number, patch, path, f"{path}: it fits, but git am was interrupted")
        following = f"cd {shlex.quote(str(work))}; git am, which goes on; then the same bump again"
    commits = _commits(repo, job, failed.path)
    return five_lines(failed, len(series.patches), commits, following)


def _failures(work: Path, number: int, patch: Patch) -> dict[str, PatchFailed]:
    """For each file where the patch does not fit what is committed, how it fails."""
    failures = {}
    with tempfile.TemporaryDirectory(prefix="megatron-r3-") as folder:
        index = Index(Path(folder), work)
        index.read_tree(resolve(work, "HEAD"))
        for change in patch.changes:
            try:
                index.apply(number, patch, [change], reverse=False)
            except PatchFailed as failed:
                failures[change.path] = failed
    return failures


def _commits(repo: Path, job: Job, path: str) -> str:
    for tree in job.old.trees:
        if tree.commit and has_commit(repo, tree.commit):
            since = upstream_commits(repo, (tree.name, tree.commit), path, job.commit)
            if since.startswith("none "):  # to an older release: what that one lacks
                before = upstream_commits(repo, (job.tree, job.commit), path, tree.commit)
                return f"{since}, which has {before}"
            return since
    return f"unknown: {repo} does not hold the base of {job.old.name}"


def _reject(work: Path, series: Series, patch: Patch, failing: list[str]) -> None:
    for path in series.blobs:  # those of patches before
        (work / f"{path}.rej").unlink(missing_ok=True)
    diff = b"".join(change.diff for change in patch.changes)
    _git(work, "apply", "--reject", "-", stdin=diff)
    for change in patch.changes:
        file = work / f"{change.path}.rej"
        if change.path in failing and not file.exists():
            # no such file, or one where there should be none: git rejects it and leaves nothing
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(change.diff)
        elif change.pre is None and change.path not in failing:
            # known to git add -u and git checkout -f; nothing is staged, so that git am --continue
            # refuses until somebody has looked
            _git(work, "add", "--intent-to-add", "--", change.path)


def _git(work: Path, *args: str, stdin: bytes = b"") -> None:
    run_git(*args, cwd=work, git_dir=work / ".git", stdin=stdin, check=False)


def _next_command(work: Path, job: Job, patch: Patch) -> str:
    paths = [f"{change.path}.rej" for change in patch.changes]
    rejects = [path for path in paths if (work / path).exists()]
    left = f" (hunks that failed: {', '.join(rejects)})" if rejects else ""
    return (
        f"cd {shlex.quote(str(work))}; resolve{left}, git add -u, git am --continue; or git "
        f"checkout -f, git am --skip if {job.tree} needs it no longer; then the same bump again"
    )
