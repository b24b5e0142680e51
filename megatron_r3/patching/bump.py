"""Start a new release line: the patches of another one, committed on a new upstream commit.

The work is done in a clone of its own by one git am, which stops where a patch does not fit; a
person goes on from there, and the same command then exports what came out.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_r3.patching.cleanroom import resolve
from megatron_r3.patching.errors import PatchingError
from megatron_r3.patching.export import export_commits, write_series
from megatron_r3.patching.history import am_in_progress, commits_above, refuse_unfinished
from megatron_r3.patching.mail import MailFailed, am
from megatron_r3.patching.matrix import Line, Matrix, parse_matrix, read_matrix
from megatron_r3.patching.series import read_series
from megatron_r3.patching.stopped import explain_stop
from megatron_r3.patching.workplace import Job, open_workplace

__all__ = ["Bumped", "bump_line"]


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
