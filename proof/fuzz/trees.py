"""Tries on Megatron trees, damaged or half patched, with the real `apply`, `revert` and `status`.

After `apply` or `revert` with exit status 0, each file that the patches change must be right to the
byte, and no other file may have changed. With another exit status, and after `status`, nothing may
have changed.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from megatron_r3.patching.series import read_series
from megatron_r3.patching.versions import patches_folder, read_versions
from proof.fidelity.trees import unpatched_copy
from proof.fuzz.command import ended, start
from proof.fuzz.driver import PLACE, Machine
from proof.fuzz.outcome import (
    BAD_MESSAGE,
    CRASH,
    LIMIT_S,
    REFUSED,
    RIGHT,
    SILENT,
    WRONGLY_REFUSED,
    Fault,
    bad_stderr,
)

_AROUND = ("pyproject.toml", "megatron/core/__init__.py", "megatron/core/package_info.py")
_MARK = "RUN-BY-THE-TREE"
Snapshot = dict[str, tuple[int, bytes]]


@dataclass(frozen=True)
class State:
    """The trees that tries copy, and the files in them that the patches change.

    Attributes:
        trees: the folder of each tree, by its form ("plain" or "git") and whether it is patched.
        base, patched: the bytes of each changed file without and with the patches; None: no file.
    """

    trees: dict[tuple[str, bool], Path]
    base: dict[str, bytes | None]
    patched: dict[str, bytes | None]


def prepare(shared: Path) -> State:
    """Make small trees, unpatched and patched, of the default tree's files that `apply` reads."""
    whole, _ = unpatched_copy(None, shared / "whole")
    versions = read_versions(patches_folder())
    paths = {path for line in versions.lines for path in read_series(line.folder).blobs}
    trees = {
        (form, done): shared / f"{form}-{done}"
        for form in ("plain", "git")
        for done in (False, True)
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
    """Mode and content of every path, .git included; a link's content is its target."""
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


# -- changes to a tree; each function returns whether the commands must still succeed


def _some(state: State, rng: random.Random, tree: Path) -> Path:
    """A random file of the tree that the patches change."""
    return tree / rng.choice([path for path in sorted(state.base) if (tree / path).is_file()])


def _file(state: State, rng: random.Random, tree: Path) -> bool:
    path, elsewhere = _some(state, rng, tree), tree.parent / "elsewhere"
    data = path.read_bytes()
    new: dict[str, Callable[[], Any]] = {
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(rng.choice((elsewhere, "/nowhere"))),
        "CRLF": lambda: path.write_bytes(data.replace(b"\n", b"\r\n")),
        "flip": lambda: path.write_bytes(data[:-1] + b"?"),
        "empty": path.touch,
        "gone": lambda: None,
    }
    kind = rng.choice([*new, "mode", "linked folder"])
    if kind == "mode":
        path.chmod(rng.choice((0o755, 0o444, 0o600, 0o000)))
    elif kind == "linked folder":
        shutil.rmtree(elsewhere, ignore_errors=True)
        os.rename(path.parent, elsewhere)
        path.parent.symlink_to(elsewhere)
    else:
        path.unlink()
        new[kind]()
    return False


def _untracked(state: State, rng: random.Random, tree: Path) -> bool:
    name = rng.choice(("notes.txt", "megatron/core/own.py", "a b\n'c\u00e9"))
    (tree / name).write_bytes(rng.randbytes(20))
    path = _some(state, rng, tree)  # beside it, a file as a killed command leaves it behind
    path.with_name(f".{path.name}.megatron-r3-new").write_bytes(rng.randbytes(9))
    return True


def _other_file(state: State, rng: random.Random, tree: Path) -> bool:
    (tree / "pyproject.toml").write_text("# mine\n")
    return False


def _staged(state: State, rng: random.Random, tree: Path) -> bool:
    if (tree / ".git").is_dir():
        subprocess.run(["git", "add", "-A"], cwd=tree, check=False, capture_output=True)
    return True


def _half(state: State, rng: random.Random, tree: Path) -> bool:
    for path in state.base:
        data = rng.choice((state.base, state.patched))[path]
        if data is None:
            (tree / path).unlink(missing_ok=True)
        else:
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(data)
    return True


def _git_folder(state: State, rng: random.Random, tree: Path) -> bool:
    git = tree / ".git"
    kind = rng.choice(("filter", "filter", "hook", "monitor", "HEAD", "index", "config", "nowhere"))
    if not git.is_dir() or kind == "nowhere":
        shutil.rmtree(git, ignore_errors=True)
        git.write_text("gitdir: /nowhere/at/all\n")
        return True
    command = f"touch {tree.parent / _MARK}; cat"
    if kind == "filter":
        (git / "info" / "attributes").write_text("* filter=evil\n")
        _configure(git, f'[filter "evil"]\nclean = "{command}"\n')
        for path in state.base:  # a new modification time makes git filter the file again
            if (tree / path).exists():
                os.utime(tree / path)
    elif kind == "monitor":
        _configure(git, f'[core]\nfsmonitor = "{command}"\n')
    elif kind == "hook":
        for name in ("post-index-change", "pre-commit", "reference-transaction"):
            (git / "hooks" / name).write_text(f"#!/bin/sh\n{command}\n")
            (git / "hooks" / name).chmod(0o755)
    else:
        odd = (b"", b"ref: refs/heads/none\n", b"\xff\xfe[", b"[core\n", b"[include]\npath = /etc")
        (git / kind).write_bytes(rng.choice(odd))
    return False


def _configure(git: Path, text: str) -> None:
    with (git / "config").open("a") as file:
        file.write(text)


_CHANGES = {"half applied": _half, "a file": _file, "untracked": _untracked,
            "pyproject.toml": _other_file, "git add": _staged}  # fmt: skip
_COMMANDS = st.sampled_from(("apply", "revert", "status"))


class Tree(Machine):
    """A tree on which changes and commands follow each other; some commands are killed.

    Attributes:
        tree: the folder of the tree.
        must: whether nothing is wrong with the tree, so that each command has to succeed.
    """

    place, prepare = PLACE / "trees", staticmethod(prepare)

    @initialize(form=st.sampled_from(("git", "git", "plain")), patched=st.booleans())
    def begin(self, form: str, patched: bool) -> None:
        """Begin with a copy of a prepared tree."""
        self.tree, self.must = self.folder / "tree", True
        shutil.copytree(self.state.trees[form, patched], self.tree, symlinks=True)

    @rule(what=st.sampled_from([*_CHANGES]), rng=st.randoms(use_true_random=False))
    def change(self, what: str, rng: random.Random) -> None:
        """Change files of the tree."""
        self.must &= _CHANGES[what](self.state, rng, self.tree)

    @rule(rng=st.randoms(use_true_random=False))
    def change_git(self, rng: random.Random) -> None:
        """Change .git, which can name programs; a rule of its own, so that it is chosen often."""
        self.must &= _git_folder(self.state, rng, self.tree)

    @rule(command=st.sampled_from(("apply", "revert")), pause=st.floats(0, 0.8))
    def kill(self, command: str, pause: float) -> None:
        """Kill a command after `pause` seconds; if that is below 0.4, just after a first write."""
        process = start([command, str(self.tree)], self.folder, "killed")
        if pause < 0.4:  # a command writes each file under this name, and then renames it
            while process.poll() is None and not any(self.tree.rglob(".*.megatron-r3-new")):
                pass
            pause /= 40
        time.sleep(pause)
        process.kill()
        process.wait()

    @rule(command=_COMMANDS)
    def run(self, command: str) -> None:
        """Run a command and judge it (`run_command`)."""
        outcome = run_command(command, self.tree, self.folder, self.state, self.must)
        if (self.folder / _MARK).exists():
            raise Fault(SILENT, f"{command} ran a program that the tree's .git names")
        self.outcome = REFUSED if outcome == REFUSED else self.outcome

    def finish(self) -> None:
        """Run `apply`; if nothing is wrong with the tree, `revert` too: then both must succeed."""
        for command in ("apply", "revert") if self.must else ("apply",):
            self.run(command)


def run_command(command: str, tree: Path, folder: Path, state: State, must: bool) -> str:
    """Run one command on a tree, and judge its exit status, its messages and what it changed.

    Args:
        command: `apply`, `revert` or `status`.
        tree: the tree.
        folder: takes the output of the command.
        state: has the right content of each file that the patches change.
        must: whether the command has to succeed.

    Returns:
        RIGHT or REFUSED.
    """
    before = _snapshot(tree)
    status = ended(start([command, str(tree)], folder, command), 8 * LIMIT_S, command)
    out, error = (
        (folder / f"{command}.{kind}").read_text(errors="replace") for kind in ("out", "err")
    )
    after, ended_with = _snapshot(tree), f"{command} ends with {status}"
    wrong = bad_stderr(error, [str(tree), *state.base]) if error else None
    if status not in (0, 1) or "Traceback" in error:
        raise Fault(CRASH, f"{ended_with}: {error[-1500:]}")
    if wrong or (error and not status) or (status and not error and command != "status"):
        raise Fault(BAD_MESSAGE, f"{ended_with}: {wrong or error!r}")
    if not out.replace("\n", "").isprintable():
        raise Fault(BAD_MESSAGE, f"{ended_with}, and its output is not printable: {out[:500]!a}")
    ours = state.base if command != "status" and not status else ()
    changed = _changed(before, after, ours)
    if changed or (command == "status" and before != after):
        raise Fault(SILENT, f"{ended_with}, and changed {changed[:5]}")
    known = all(_is_known(path, before.get(path), state) for path in state.base)
    if command == "status" and not error:
        _judge_status(status, out, before, state, known)
        return RIGHT if known else REFUSED
    if status:
        if must:
            raise Fault(WRONGLY_REFUSED, error)
        return REFUSED
    for path, data in (state.patched if command == "apply" else state.base).items():
        if (after[path][1] if path in after else None) != data:
            raise Fault(SILENT, f"{ended_with}, and {path} has the wrong content")
        if path in before and path in after and before[path][0] != after[path][0]:
            raise Fault(SILENT, f"{command} changed the mode of {path}")
    if not known:
        raise Fault(SILENT, f"{command} overwrote a file that was neither unpatched nor patched")
    return RIGHT


def _is_known(path: str, found: tuple[int, bytes] | None, state: State) -> bool:
    if found is None:
        return None in (state.base[path], state.patched[path])
    return stat.S_ISREG(found[0]) and found[1] in (state.base[path], state.patched[path])


def _changed(before: Snapshot, after: Snapshot, ours: Collection[str]) -> list[str]:
    """Paths other than `ours` that changed. A file that a killed command left may be removed."""
    # a patch that adds a file may add its folder too
    folders = {str(folder) for path in ours for folder in Path(path).parents}
    return sorted(
        path
        for path in before.keys() | after.keys()
        if path not in ours
        and before.get(path) != after.get(path)
        and not (path.endswith(".megatron-r3-new") and path not in after)
        and path not in folders
    )


def _judge_status(status: int, out: str, before: Snapshot, state: State, known: bool) -> None:
    now = {path: before[path][1] if path in before else None for path in state.base}
    truth = "half applied" if known else "unknown"
    truth = "pristine" if now == state.base else "applied" if now == state.patched else truth
    said = out.partition(":")[0]
    if said != truth or status != int(truth in ("unknown", "half applied")):
        raise Fault(SILENT, f"status says {said} and ends with {status}; it is {truth}")
