"""Start a new release line: the patches of another one, committed on a new upstream commit.

The work is done in a clone of its own by one git am, which stops where a patch does not fit; a
person goes on from there, and the same command then exports what came out.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_r3.patching.apply import five_lines, upstream_commits
from megatron_r3.patching.cleanroom import borrow_objects, git_path, has_commit, read_git, resolve
from megatron_r3.patching.export import (
    MailFailed,
    am,
    am_in_progress,
    commits_above,
    export_commits,
    refuse_unfinished,
    write_series,
)
from megatron_r3.patching.git import PatchingError, run_git
from megatron_r3.patching.index import Index, PatchFailed
from megatron_r3.patching.series import Patch, Series, read_series
from megatron_r3.patching.tree import dirty_files
from megatron_r3.patching.versions import Line, Matrix, parse_matrix, read_matrix


@dataclass(frozen=True)
class Bumped:
    """A new release line.

    Attributes:
        names: the files of its patches.
        left_out: the patches of the old line whose subject it does not have.
        again: the line was there already, made from the same commit; nothing was done.
    """

    line: str
    names: tuple[str, ...]
    left_out: tuple[str, ...]
    again: bool


def bump_line(
    old: str, new: str, repo: Path, patches: Path, *, line: str = "", work: Path | None = None
) -> Bumped:
    """Bring the series of the line `old` to the commit `new` of the clone `repo`, as a new `line`.

    `work` is made a checkout of `new` with the patches as commits; `repo` is not changed. Once
    they are all there, the patches and the line's entry in versions.toml are written, or neither.

    Raises:
        PatchingError: a patch does not fit, which has to be resolved in `work`; or something is in
            the way: another line of this name, another checkout in `work`, uncommitted changes.
    """
    matrix, repo = read_matrix(patches), repo.resolve()
    job = Job(matrix.line(old), resolve(repo, new), _tree_name(repo, new), line or _derived(new))
    _check_name(job.line)
    work = (work or Path("build", "bump") / job.line).absolute()
    there = _already_there(matrix, job)
    if there and not work.exists():
        return _bumped(matrix, job, again=True)
    open_workplace(work, repo, job)
    series = read_series(job.old.folder)
    if not am_in_progress(work):
        refuse_unfinished(work)
        if not commits_above(work, job.commit):
            with suppress(MailFailed):  # git am is then in progress; that is what is explained
                am(work, [patch.file for patch in series.patches])
    if am_in_progress(work):
        raise PatchingError(explain_stop(work, job, series, repo))
    exported = export_commits(work, job.commit, matrix, job.line)
    if _differs(matrix, job, exported, there):
        raise PatchingError(
            f"{patches / job.line} is there and is not what {work} exports; it is not overwritten: "
            + (f"megatron-r3 export {work} --line {job.line}" if there else "move it away")
        )
    if not there:
        text = _with_line(patches, job)
        write_series(patches, job.line, exported, {"versions.toml": text.encode()})
    return _bumped(read_matrix(patches), job, again=there)


def _derived(new: str) -> str:
    if not (tag := re.fullmatch(r"core_v(\d+\.\d+\.\d+)", new)):
        raise PatchingError(f"what shall the line of {new} be called? give --name")
    return f"core_r{tag[1]}"


def _check_name(line: str) -> None:
    if not re.fullmatch(r"\w[\w.-]*", line, re.ASCII):
        raise PatchingError(f"{line!r} is no name for a release line: letters, digits and . _ -")


def _tree_name(repo: Path, new: str) -> str:
    """How versions.toml calls the commit: as the tag that it was named by, or by its first digits.

    A branch moves, so its name is no name for a tree.
    """
    commit = resolve(repo, new)
    try:
        return new if resolve(repo, f"refs/tags/{new}") == commit else commit[:12]
    except PatchingError:
        return commit[:12]


def _already_there(matrix: Matrix, job: Job) -> bool:
    lines: list[Line] = [line for line in matrix.lines if line.name == job.line]
    if lines and job.commit not in [tree.commit for tree in lines[0].trees]:
        raise PatchingError(
            f"the line {job.line} is there already, for another commit than {job.tree}; "
            "choose another --name"
        )
    return bool(lines)


def _differs(matrix: Matrix, job: Job, exported: dict[str, bytes], there: bool) -> bool:
    """Whether patches are in the way; those of an export that was killed are not."""
    files = list((matrix.folder / job.line).glob("*.patch"))
    known = all(exported.get(file.name) == file.read_bytes() for file in files)
    return not known or (there and len(files) < len(exported))


def _with_line(patches: Path, job: Job) -> str:
    """versions.toml with the new line at its end.

    Raises:
        PatchingError: that would not be a valid versions.toml.
    """
    text = (patches / "versions.toml").read_text(encoding="utf-8").rstrip("\n")
    name, tree, python, image = (
        json.dumps(value, ensure_ascii=False)
        for value in (job.line, job.tree, job.old.python, job.old.image)
    )
    text += f"""

[lines.{name}]
python = {python}
image = {image}
status = "new"

[[lines.{name}.trees]]
name = {tree}
commit = "{job.commit}"
"""
    parse_matrix(text, patches)
    return text


def _bumped(matrix: Matrix, job: Job, *, again: bool) -> Bumped:
    ours = read_series(matrix.line(job.line).folder)
    subjects = {patch.subject for patch in ours.patches}
    left_out = [
        patch.file.name
        for patch in read_series(job.old.folder).patches
        if patch.subject not in subjects
    ]
    return Bumped(
        job.line, tuple(patch.file.name for patch in ours.patches), tuple(left_out), again
    )


# The checkout that a bump works in: made once, and known again by a note in its git directory.

_NOTE = "megatron-r3-bump"
_TAGS = "refs/tags/"
# a person goes on with git am there, and her own configuration must not resolve anything
_CONFIG = {
    "am.threeWay": "false",
    "apply.whitespace": "nowarn",
    "commit.gpgsign": "false",
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",
    "core.hooksPath": os.devnull,
    "rerere.enabled": "false",
}


@dataclass(frozen=True)
class Job:
    """One bump: from the line `old` to `commit`, which is called `tree`, as the new `line`."""

    old: Line
    commit: str
    tree: str
    line: str

    @property
    def note(self) -> str:
        """What tells its checkout from that of another one."""
        return f"{self.old.name} {self.commit} {self.line}\n"


def open_workplace(work: Path, repo: Path, job: Job) -> None:
    """Make `work` a checkout of `repo` at the job's commit, or find that it is the one of this job.

    It shares the objects of `repo`, which itself is not changed. It is there whole or not at all.

    Raises:
        PatchingError: `work` is something else.
    """
    if work.exists() and (not work.is_dir() or any(work.iterdir())):
        note = work / ".git" / _NOTE
        if work.stat().st_uid != os.geteuid():  # git runs there, with the configuration there
            raise PatchingError(f"{work} belongs to another user: choose another --work")
        if not note.is_file() or note.read_text() != job.note:
            raise PatchingError(
                f"{work} is something else than the checkout of this bump: choose another --work, "
                "or remove it"
            )
        return
    work.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{work.name}-", dir=work.parent) as temp:
        clone = Path(temp) / "clone"
        clone.mkdir()
        run_git("init", "--quiet", "--template=", cwd=clone)
        git_dir = clone / ".git"
        git = partial(run_git, cwd=clone, git_dir=git_dir)
        for key, value in _CONFIG.items():
            git("config", key, value)
        # not git clone: that runs a second git in `repo`, with the configuration of `repo`
        borrow_objects(repo, git_dir)
        tags = read_git(repo, "for-each-ref", "--format=create %(refname) %(objectname)", _TAGS)
        git("update-ref", "--stdin", stdin=tags.stdout)
        git("checkout", "--quiet", "--detach", job.commit)
        (git_dir / _NOTE).write_text(job.note)
        clone.rename(work)


# Where git am stopped in the checkout of a bump: what a person needs to go on.


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
