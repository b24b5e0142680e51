"""Start a new release line: commit the patches of another line on a new upstream commit.

One git am commits the patches in a checkout made for the bump, and stops at a patch that does not
fit. A person resolves that patch and continues git am; the same bump command then exports the
commits.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from keepers.clone import borrow, committed_files, has_commit, refuse_unfinished, resolve
from keepers.export import (
    MailFailed,
    am,
    am_stopped_at,
    commits_above,
    export_commits,
    write_series,
)
from megatron_r3.patching.fetch import new_folder
from megatron_r3.patching.git import PatchingError, git, run_git
from megatron_r3.patching.scratch import PatchFailed, scratch
from megatron_r3.patching.series import Patch, Series, read_series
from megatron_r3.patching.versions import Line, Versions, parse_versions, read_versions

# The file in the git directory of a bump's checkout by which the next run recognises the checkout.
_NOTE = "megatron-r3-bump"
# The settings of a bump's checkout, where the user continues with plain git. The user's own
# settings could resolve a conflict silently: with am.threeWay git merges, and with rerere git
# repeats an old resolution.
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
class Bumped:
    """A new release line.

    Attributes:
        names: the names of the line's patch files.
        left_out: the patch files of the old line whose subjects are missing in the new line.
        again: whether the line was there already, for the same commit; then nothing was written.
    """

    line: str
    names: tuple[str, ...]
    left_out: tuple[str, ...]
    again: bool


@dataclass(frozen=True)
class Job:
    """One bump: the patches of the line `old` go to `commit`, and become the new `line`.

    Attributes:
        tree: what messages call the commit: its tag, or the first 12 digits of its id.
    """

    old: Line
    commit: str
    tree: str
    line: str

    @property
    def note(self) -> str:
        """The text that marks this bump's checkout; another bump has another text."""
        return f"{self.old.name} {self.commit} {self.line}\n"


def bump_line(
    old: str, new: str, repo: Path, patches: Path, *, line: str = "", work: Path | None = None
) -> Bumped:
    """Bring the series of the line `old` to the commit `new` of the clone `repo`, as a new `line`.

    `work` (default: build/bump/LINE) becomes a checkout of `new` with the patches as commits;
    `repo` is not changed. Once all patches are committed in `work`, the patch files and the line's
    entry in versions.toml are written, all or none.

    Raises:
        PatchingError: a patch does not fit, and has to be resolved in `work`; or there is another
            line of this name, another checkout in `work`, or an uncommitted change.
    """
    versions, repo = read_versions(patches), repo.resolve()
    job = _job(versions.line(old), new, repo, line)
    work = (work or Path("build", "bump") / job.line).absolute()
    there = _already_there(versions, job)
    if there and not work.exists():
        return _bumped(versions, job, again=True)
    open_workplace(work, repo, job)
    series = read_series(job.old.folder)
    if not am_stopped_at(work):
        refuse_unfinished(work)
        if not commits_above(work, job.commit):
            with suppress(MailFailed):  # git am is then in progress: see `explain_stop`
                am(work, [patch.file for patch in series.patches])
    if am_stopped_at(work):
        raise PatchingError(explain_stop(work, job, series, repo))
    exported = export_commits(work, job.commit, versions, job.line)
    if _differs(versions, job, exported, there):
        raise PatchingError(
            f"{patches / job.line} has other patches than {work}, and is not overwritten: "
            + (f"make export MEGATRON={work} LINE={job.line}" if there else "move that folder away")
        )
    if not there:
        text = _with_line(patches, job)
        write_series(patches, job.line, exported, {"versions.toml": text.encode()})
    return _bumped(read_versions(patches), job, again=there)


def _job(old: Line, new: str, repo: Path, line: str) -> Job:
    commit = resolve(repo, new)
    tree = commit[:12]  # HEAD and branches move, so of all names only a tag is used
    with suppress(PatchingError):
        tree = new if resolve(repo, f"refs/tags/{new}") == commit else tree
    tag = re.fullmatch(r"core_v(\d+\.\d+\.\d+)", new)
    if not line and not tag:
        raise PatchingError(
            f"{new} is no tag core_vX.Y.Z that would name the new line: give --name "
            "(make bump: LINE=NAME)"
        )
    line = line or (f"core_r{tag[1]}" if tag else "")
    if not re.fullmatch(r"\w[\w.-]*", line, re.ASCII):
        raise PatchingError(f"{line!r} is no name for a release line: use letters, digits, . _ -")
    return Job(old, commit, tree, line)


def _already_there(versions: Versions, job: Job) -> bool:
    lines = [line for line in versions.lines if line.name == job.line]
    if lines and job.commit not in [tree.commit for tree in lines[0].trees]:
        raise PatchingError(
            f"the line {job.line} is there already, for another commit than {job.tree}: "
            "choose another --name (make bump: LINE=NAME)"
        )
    return bool(lines)


def _differs(versions: Versions, job: Job, exported: dict[str, bytes], there: bool) -> bool:
    """Whether the folder of the line has other patches than `exported`.

    A killed bump may leave some patches of `exported` and no entry in versions.toml: the same bump
    then writes the rest. A line with an entry (`there`) must have every patch of `exported`.
    """
    files = list((versions.folder / job.line).glob("*.patch"))
    known = all(exported.get(file.name) == file.read_bytes() for file in files)
    return not known or (there and len(files) < len(exported))


def _with_line(patches: Path, job: Job) -> str:
    """The text of versions.toml with an entry for the new release line at its end.

    Raises:
        PatchingError: the result would not be a valid versions.toml.
    """
    text = (patches / "versions.toml").read_text(encoding="utf-8").rstrip("\n")
    values = (job.line, job.tree, job.old.python, job.old.image)
    # a JSON string is a TOML string too
    name, tree, python, image = (json.dumps(value, ensure_ascii=False) for value in values)
    text += f"""

[lines.{name}]
python = {python}
image = {image}
status = "new"

[[lines.{name}.trees]]
name = {tree}
commit = "{job.commit}"
"""
    parse_versions(text, patches)
    return text


def _bumped(versions: Versions, job: Job, *, again: bool) -> Bumped:
    ours = read_series(versions.line(job.line).folder).patches
    subjects = {patch.subject for patch in ours}
    old = read_series(job.old.folder).patches
    left_out = tuple(patch.file.name for patch in old if patch.subject not in subjects)
    return Bumped(job.line, tuple(patch.file.name for patch in ours), left_out, again)


def open_workplace(work: Path, repo: Path, job: Job) -> None:
    """Make `work` a checkout of `repo` at the commit of `job`, unless it is there already.

    The checkout shares the objects of `repo`, and `repo` is not changed. If a step fails, no
    checkout is left.

    Raises:
        PatchingError: `work` is a file, or has files and is not this job's checkout.
    """
    if work.exists() and (not work.is_dir() or any(work.iterdir())):
        note = work / ".git" / _NOTE
        if not note.is_file() or note.read_text() != job.note:
            raise PatchingError(
                f"{work} is there, and is not the checkout of this bump: move it away"
            )
        return
    with new_folder(work) as folder:
        borrow(repo, folder)
        for key, value in _CONFIG.items():
            git(folder, "config", key, value)
        tags = ("for-each-ref", "--format=create %(refname) %(objectname)", "refs/tags/")
        git(folder, "update-ref", "--stdin", stdin=run_git(repo, *tags).stdout)
        git(folder, "checkout", "--quiet", "--detach", job.commit)
        (folder / ".git" / _NOTE).write_text(job.note)


def explain_stop(work: Path, job: Job, series: Series, repo: Path) -> str:
    """The message about the patch at which git am stopped in `work`."""
    number = am_stopped_at(work)
    patch = series.patches[number - 1]
    failed, following = _try_patch(work, number, patch), f"cd {shlex.quote(str(work))}; "
    if failed:
        following += (
            "git am --show-current-patch=diff | git apply --3way, resolve, git add -u, git am "
            f"--continue; or, if {job.tree} needs no such patch, git am --skip"
        )
    else:
        path = patch.changes[0].path
        reason = {path: f"{path}: the patch fits, but git am was interrupted"}
        failed = PatchFailed(number, patch, reason)
        following += "git am, to continue it"
    commits = f"upstream commits: {_commits(repo, job, failed.path)}"
    again = "then the same bump again"
    return failed.explain(len(series.patches), commits, f"next: {following}; {again}")


def _try_patch(work: Path, number: int, patch: Patch) -> PatchFailed | None:
    """How the patch fails on the files of HEAD in `work`; None if the patch fits."""
    files = committed_files(work, "HEAD", [change.path for change in patch.changes])
    with scratch(files) as ours:
        try:
            ours.apply(number, patch, patch.changes)
        except PatchFailed as failed:
            return failed
    return None


def _commits(repo: Path, job: Job, path: str) -> str:
    for tree in job.old.trees:
        if tree.commit and has_commit(repo, tree.commit):
            return upstream_commits(repo, (tree.name, tree.commit), path, job.commit)
    return f"unknown: {repo} lacks the base commit of {job.old.name}"


def upstream_commits(repo: Path, base: tuple[str, str], path: str, head: str, most: int = 3) -> str:
    """One line of text: the newest `most` commits up to `head` that touched `path` since `base`.

    `base` is a pair (name, commit).
    """
    name, commit = base
    command = ("log", "--oneline", "--no-decorate", "--no-color", f"{commit}..{head}", "--", path)
    commits = git(repo, *command).splitlines()
    shown = "; ".join(commits[:most]) or "none"
    more = f" and {len(commits) - most} more" if len(commits) > most else ""
    return f"{shown}{more} since {name}"
