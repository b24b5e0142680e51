"""Tries on Megatron trees, damaged or half patched, with the real `apply`, `revert` and `status`.

After a command with exit status 0, each file of the series must be right to the byte, and no other
file may have changed. After any other exit status, nothing at all may have changed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_r3.patching.series import read_series
from megatron_r3.patching.versions import patches_folder, read_versions
from proof.fidelity.trees import unpatched_copy
from proof.fuzz.command import bad_stderr, start
from proof.fuzz.outcome import (
    BAD_MESSAGE,
    CRASH,
    REFUSED,
    RIGHT,
    SILENT,
    WRONGLY_REFUSED,
    Kind,
    Verdict,
    note,
)

_AROUND = ("pyproject.toml", "megatron/core/__init__.py", "megatron/core/package_info.py")
_MARK = "RUN-BY-THE-TREE"
Snapshot = dict[str, tuple[int, bytes]]


@dataclass(frozen=True)
class State:
    """The trees that tries copy, and what is in them.

    Attributes:
        trees: the folder of each tree, by its form ("plain" or "git") and whether it is patched.
        base, patched: the bytes of each file of the series. None means that there is no such file.
    """

    trees: dict[tuple[str, bool], Path]
    base: dict[str, bytes | None]
    patched: dict[str, bytes | None]


def prepare(shared: Path) -> State:
    """Copy the files of the default tree that a patch tool looks at, unpatched and patched."""
    whole, _ = unpatched_copy(None, shared / "whole")
    versions = read_versions(patches_folder())
    paths = {path for line in versions.lines for path in read_series(line.folder).blobs}
    trees = {
        (form, done): shared / f"{form}-{done}" for form in ("plain", "git") for done in (0, 1)
    }
    plain = trees["plain", False]
    for path in [*paths, *_AROUND]:
        if (whole / path).is_file():
            (plain / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(whole / path, plain / path)
    shutil.rmtree(whole)
    shutil.copytree(plain, trees["git", False])
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "base"]):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=trees["git", False], check=True)
    for form in ("plain", "git"):
        shutil.copytree(trees[form, False], trees[form, True])
        process = start(["apply", str(trees[form, True])], shared, form)
        if process.wait():
            raise RuntimeError((shared / f"{form}.err").read_text())
    before, after = (_snapshot(trees["plain", done]) for done in (False, True))
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    return State(
        trees,
        {path: before[path][1] if path in before else None for path in changed},
        {path: after[path][1] if path in after else None for path in changed},
    )


def _snapshot(tree: Path) -> Snapshot:
    """Mode and content of every path, .git included. The content of a link is its target."""
    found: Snapshot = {}
    for folder, folders, files in os.walk(tree):
        for name in [*folders, *files]:
            path = Path(folder, name)
            info = path.lstat()
            content = b""
            if stat.S_ISLNK(info.st_mode):
                content = os.fsencode(os.readlink(path))
            elif stat.S_ISREG(info.st_mode):
                content = path.read_bytes()
            found[str(path.relative_to(tree))] = (info.st_mode, content)
    return found


# -- changes to a tree. Each returns what it changed, and whether the commands must still succeed.


def _some(state: State, rng: random.Random, tree: Path) -> str:
    return rng.choice([path for path in sorted(state.base) if (tree / path).is_file()])


def _nothing(state: State, rng: random.Random, tree: Path) -> tuple[str, bool]:
    return "nothing is changed", True


def _flip(state: State, rng: random.Random, tree: Path) -> tuple[str, bool]:
    path = _some(state, rng, tree)
    data = bytearray((tree / path).read_bytes())
    where = rng.randrange(len(data))
    data[where] ^= 1 << rng.randrange(7)
    (tree / path).write_bytes(data)
    return f"flip: byte {where} of {path}", False


def _delete(state: State, rng: random.Random, tree: Path) -> tuple[str, bool]:
    path = _some(state, rng, tree)
    (tree / path).unlink()
    return f"deleted: {path}", False


def _crlf(state: State, rng: random.Random, tree: Path) -> tuple[str, bool]:
    paths = [_some(state, rng, tree)]
    if rng.random() < 0.5:
        paths = [path for path in state.base if (tree / path).is_file()]
    for path in paths:
        (tree / path).write_bytes((tree / path).read_bytes().replace(b"\n", b"\r\n"))
    return f"CRLF: {len(paths)} files", False


def _odd_file(state: State, rng: random.Random, tree: Path) -> tuple[str, bool]:
    path = _some(state, rng, tree)
    kind = rng.choice(("link", "link away", "folder", "pipe", "linked folder", "empty"))
    target = tree / path
    if kind == "linked folder":
        target = target.parent
    if kind in ("link", "linked folder"):
        os.rename(target, tree.parent / "elsewhere")
        target.symlink_to(tree.parent / "elsewhere")
    else:
        target.unlink()
        if kind == "folder":
            target.mkdir()
        elif kind == "pipe":
            os.mkfifo(target)
        elif kind == "empty":
            target.write_bytes(b"")
        else:
            target.symlink_to("/nowhere")
    return f"odd file: {kind} {path}", False


def _mode(state: State, rng: random.Random, tree: Path) -> tuple[str, bool]:
    path, mode = _some(state, rng, tree), rng.choice((0o755, 0o444, 0o600, 0o000))
    (tree / path).chmod(mode)
    return f"mode: {mode:o} of {path}", False


def _untracked(state: State, rng: random.Random, tree: Path) -> tuple[str, bool]:
    path = tree / rng.choice(("notes.txt", "megatron/core/own.py", "a b\n'c\u00e9"))
    path.write_bytes(rng.randbytes(20))
    return f"untracked: {path.name!a}", True


def _other_file(state: State, rng: random.Random, tree: Path) -> tuple[str, bool]:
    (tree / "pyproject.toml").write_text("# mine\n")
    if rng.random() < 0.5 and (tree / ".git").exists():
        subprocess.run(["git", "add", "-A"], cwd=tree, check=True)
    return "another file is changed", False


def _half(state: State, rng: random.Random, tree: Path) -> tuple[str, bool]:
    for path in state.base:
        data = rng.choice((state.base, state.patched))[path]
        if data is None:
            (tree / path).unlink(missing_ok=True)
        else:
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(data)
    return "half applied", True


def _staged(state: State, rng: random.Random, tree: Path) -> tuple[str, bool]:
    said, must = rng.choice((_half, _flip, _delete))(state, rng, tree)
    if (tree / ".git").exists():
        subprocess.run(["git", "add", "-A"], cwd=tree, check=True)
    return f"staged: {said}", must


def _leftover(state: State, rng: random.Random, tree: Path) -> tuple[str, bool]:
    path = tree / _some(state, rng, tree)
    path.with_name(f".{path.name}.megatron-r3-new").write_bytes(rng.randbytes(9))
    return "leftover of a killed one", True


def _killed(state: State, rng: random.Random, tree: Path) -> tuple[str, bool]:
    raise AssertionError("this stands for a killed command, not for a change: see `attempt`")


def _git_folder(state: State, rng: random.Random, tree: Path) -> tuple[str, bool]:
    git = tree / ".git"
    kind = rng.choice((*["filter"] * 4, "hook", "monitor", "head", "no index", "nowhere", "config"))
    if not git.exists() or kind == "nowhere":
        shutil.rmtree(git, ignore_errors=True)
        git.write_text("gitdir: /nowhere/at/all\n")
        return "git: a .git that leads nowhere", True
    command = f"touch {tree.parent / _MARK}; cat"
    if kind == "filter":
        (git / "info" / "attributes").write_text("* filter=evil\n")
        subprocess.run(["git", "config", "filter.evil.clean", command], cwd=tree, check=True)
        for path in state.base:  # a new time makes git read the file again, through the filter
            if (tree / path).exists():
                os.utime(tree / path)
    elif kind == "monitor":
        subprocess.run(["git", "config", "core.fsmonitor", command], cwd=tree, check=True)
    elif kind == "hook":
        for name in ("post-index-change", "pre-commit", "reference-transaction"):
            (git / "hooks" / name).write_text(f"#!/bin/sh\n{command}\n")
            (git / "hooks" / name).chmod(0o755)
    elif kind == "head":
        (git / "HEAD").write_bytes(rng.choice((b"", b"ref: refs/heads/none\n", b"\xff\xfe")))
    elif kind == "config":
        (git / "config").write_bytes(
            rng.choice((b"[core\n", b"\xff\xfe[", b"[include]\npath = /etc"))
        )
    else:
        (git / "index").unlink()
    return f"git: {kind}", False


_CHANGES: list[Callable[[State, random.Random, Path], tuple[str, bool]]] = [
    _nothing, _flip, _delete, _crlf, _odd_file, _mode, _untracked, _other_file, _half, _half,
    _staged, _leftover, _git_folder, _git_folder, _git_folder, *[_killed] * 6,
]  # fmt: skip


# -- a try


def attempt(rng: random.Random, folder: Path, state: State) -> Verdict:
    """Change a tree, then run commands. Where they must succeed, the last two are apply, revert."""
    form, done = rng.choice([*state.trees])
    change = rng.choice(_CHANGES)
    first = rng.choice(("apply", "apply", "revert", "status"))
    if change is _git_folder and rng.random() < 0.7:  # `apply` on a git tree asks git the most
        form, done, first = "git", False, "apply"
    tree = folder / "tree"
    shutil.copytree(state.trees[form, done], tree, symlinks=True)
    if change is _killed:
        first = rng.choice(("apply", "revert"))
        note(folder, f"killed: {first} of {form}, {'patched' if done else 'unpatched'}")
        _kill(rng, first, tree, folder)
        must, commands = True, [rng.choice(("status", "apply")), "apply", "revert"]
    else:
        said, must = change(state, rng, tree)
        note(folder, f"{said}; {first}, {form}, {'patched' if done else 'unpatched'}")
        commands = [first, "apply", "revert"] if must else [first]
    verdict = Verdict(RIGHT)
    for command in commands:
        verdict_now = run_command(command, tree, folder, state, must)
        if verdict_now.outcome != RIGHT:
            verdict = verdict_now
        if verdict_now.outcome not in (RIGHT, REFUSED):
            break
    if (folder / _MARK).exists():
        return Verdict(SILENT, "a program that the tree names was run")
    return verdict


def _kill(rng: random.Random, command: str, tree: Path, folder: Path) -> None:
    """Kill a command after some time, or when it begins to write."""
    process = start([command, str(tree)], folder, "killed")
    if rng.random() < 0.3:
        time.sleep(rng.uniform(0, 0.8))
    else:
        while process.poll() is None and not any(tree.rglob(".*.megatron-r3-new")):
            pass
        time.sleep(rng.uniform(0, 0.01))
    process.send_signal(signal.SIGKILL)
    process.wait()


def run_command(command: str, tree: Path, folder: Path, state: State, must: bool) -> Verdict:
    """Run one command on a tree, and judge its exit status, its messages and what it changed.

    Args:
        command: `apply`, `revert` or `status`.
        tree: the tree.
        folder: takes the output of the command.
        state: what the files of the series must be.
        must: whether the command has to succeed.
    """
    before = _snapshot(tree)
    files = {path: before.get(path) for path in state.base}
    known = all(_is_known(path, files[path], state) for path in files)
    status = start([command, str(tree)], folder, command).wait()
    out = (folder / f"{command}.out").read_text(errors="replace")
    error = (folder / f"{command}.err").read_text(errors="replace")
    after = _snapshot(tree)
    if status not in (0, 1):
        return Verdict(CRASH, f"{command}: exit status {status}: {error[-1500:]}")
    if command == "status":
        return _status(status, out, error, before, after, state, known, tree)
    if status:
        wrong = bad_stderr(error, [str(tree), *state.base])
        if wrong is not None:
            return Verdict(CRASH if "Traceback" in error else BAD_MESSAGE, f"{command}: {wrong}")
        changed = _changed(before, after, set())
        if changed:
            return Verdict(SILENT, f"{command} refused, and changed {changed[:5]}")
        return Verdict(WRONGLY_REFUSED if must else REFUSED, error)
    if error or not out.replace("\n", "").isprintable():
        return Verdict(BAD_MESSAGE, f"{command} ends with 0 and says {error!a} {out[:500]!a}")
    goal = state.patched if command == "apply" else state.base
    for path, data in goal.items():
        if (after[path][1] if path in after else None) != data:
            return Verdict(SILENT, f"{command} ends with 0, and {path} is not what it must be")
        if path in before and path in after and before[path][0] != after[path][0]:
            return Verdict(SILENT, f"{command} changed the mode of {path}")
    if not known:
        return Verdict(SILENT, f"{command} wrote over a file that was neither base nor patched")
    changed = _changed(before, after, {*state.base})
    return Verdict(SILENT, f"{command} changed {changed[:5]} too") if changed else Verdict(RIGHT)


def _is_known(path: str, found: tuple[int, bytes] | None, state: State) -> bool:
    if found is None:
        return None in (state.base[path], state.patched[path])
    return stat.S_ISREG(found[0]) and found[1] in (state.base[path], state.patched[path])


def _changed(before: Snapshot, after: Snapshot, ours: set[str]) -> list[str]:
    """Paths that are not as they were. Files that a killed command left behind may be gone."""
    folders = {str(folder) for path in ours for folder in Path(path).parents}
    return sorted(
        path
        for path in before.keys() | after.keys()
        if path not in ours
        and before.get(path) != after.get(path)
        and not (path.endswith(".megatron-r3-new") and path not in after)
        and path not in folders
    )


def _status(
    status: int,
    out: str,
    error: str,
    before: Snapshot,
    after: Snapshot,
    state: State,
    known: bool,
    tree: Path,
) -> Verdict:
    if before != after:
        return Verdict(SILENT, f"status changed {_changed(before, after, set())[:5]}")
    if error:
        wrong = bad_stderr(error, [str(tree)])
        return Verdict(BAD_MESSAGE, f"status: {wrong}") if wrong else Verdict(REFUSED, error)
    if str(tree) not in out or not out.replace("\n", "").isprintable():
        return Verdict(BAD_MESSAGE, f"status says {out[:1000]!a}")
    now = {path: before[path][1] if path in before else None for path in state.base}
    truth = {True: "pristine", False: "unknown"}[now == state.base]
    truth = "applied" if now == state.patched else truth
    truth = "half applied" if truth == "unknown" and known else truth
    said = out.partition(":")[0]
    if said != truth or status != int(truth in ("unknown", "half applied")):
        return Verdict(SILENT, f"status says {said} and ends with {status}; it is {truth}")
    return Verdict(RIGHT) if known else Verdict(REFUSED, out)


KIND = Kind("trees", 12, 240.0, 2048, prepare, attempt)
