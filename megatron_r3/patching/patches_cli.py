"""The commands on patches: apply, revert, status and megatron.

Each command returns 0, except that `status` returns 1 for a tree that is unknown or half applied. A
refusal is a PatchingError, which `megatron_r3.cli` prints as one line.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_r3.patching.apply import Change, apply_series, revert_series, why_not
from megatron_r3.patching.fetch import UPSTREAM, clone_tree, fetch_tree, tree_folder
from megatron_r3.patching.git import names
from megatron_r3.patching.record import Unreleased, files_digest, read_record
from megatron_r3.patching.series import GROUPS
from megatron_r3.patching.tree import TreeState, TreeStatus, identify
from megatron_r3.patching.unreleased import find_fits, how_to_take
from megatron_r3.patching.versions import patches_folder, read_versions

Run = Callable[[argparse.Namespace], int]
Commands = argparse._SubParsersAction  # argparse has no public name for this class


def add_commands(commands: Commands) -> None:
    """Register the commands; each sets `run`, which takes the parsed arguments."""
    for name, run, summary in (
        ("apply", run_apply, "put the patches into a Megatron-LM tree"),
        ("revert", run_revert, "remove the patches from a Megatron-LM tree"),
        ("status", run_status, "show which release a tree is and whether it is patched"),
    ):
        argument = add_command(commands, name, run, summary)
        argument("tree", type=Path, metavar="DIR", help="the Megatron-LM tree")
        argument("--line", default="", help="release line of the tree (default: the one that fits)")
        if name == "apply":
            hint = "also patch a tree between releases, if the patches of a line fit it exactly"
            argument("--unreleased", action="store_true", help=hint)
            hint = f"apply only these groups of patches ({', '.join(g.name for g in GROUPS)})"
            argument("--groups", nargs="+", default=(), metavar="NAME", help=hint)

    argument = add_command(
        commands, "megatron", run_megatron, "fetch a Megatron-LM tree that the patches fit"
    )
    hint = "a release line or a tree of versions.toml (default: the file's own default)"
    argument("--version", metavar="NAME", help=hint)
    hint = "source package from PyPI, or commit from git (default: pypi)"
    argument("--source", choices=("pypi", "git"), default="pypi", help=hint)
    hint = "git repository that has the commit (default: upstream's)"
    argument("--repo", default=UPSTREAM, metavar="URL", help=hint)
    hint = "folder to put the tree in (default: build)"
    argument("--out", type=Path, default=Path("build"), help=hint)


def add_command(commands: Commands, name: str, run: Run, summary: str) -> Callable[..., Any]:
    """Register one command; return the function that adds its arguments."""
    parser = commands.add_parser(name, help=summary, description=summary)
    parser.set_defaults(run=run)
    hint = "folder of patches (default: those that came with megatron-r3)"
    parser.add_argument("--patches", type=Path, metavar="DIR", help=hint)
    return parser.add_argument


def patches_of(args: argparse.Namespace) -> Path:
    """The folder that --patches names; by default the folder that came with megatron-r3."""
    return args.patches or patches_folder()


def run_apply(args: argparse.Namespace) -> int:
    """Apply the patches and say what was done."""
    how = {"line": args.line, "unreleased": args.unreleased, "groups": args.groups}
    change = apply_series(args.tree, patches_of(args), **how)
    print(_done("applied", "to", change))
    if tree := change.status.unreleased:
        print(_differ(tree))
        if change.others:
            print(change.others)
        print(f"this tree was not tested yet; next: make check MEGATRON={_quoted(change.status)}")
    return 0


def run_revert(args: argparse.Namespace) -> int:
    """Take the patches back and say what was done."""
    print(_done("reverted", "in", revert_series(args.tree, patches_of(args), line=args.line)))
    return 0


def run_status(args: argparse.Namespace) -> int:
    """Print `STATE: TREE`, which scripts read, then which release the tree is and what to do."""
    versions = read_versions(patches_of(args))
    status = identify(args.tree, versions, args.line)
    print(f"{status.state.value}: {status.root}")  # the image's build looks for `applied: `
    if status.state is TreeState.UNKNOWN:
        fits = [] if status.unreleased else find_fits(status.root, versions, args.line)
        print(how_to_take(status.root, fits) if fits else why_not(status, versions))
        return 1
    tree = status.unreleased
    what = "unreleased" if tree and tree.differ else "release"
    print(f"{what}: {_tree(status)}, {_size(status)}{_absent(status)}")
    if tree:
        print(_differ(tree))
    print(_groups(status))
    if status.state is TreeState.PRISTINE:
        print(f"not patched: make apply MEGATRON={_quoted(status)}")
    if status.state is TreeState.HALF_APPLIED:
        rest = [p for p in status.files if p not in status.patched and p not in status.absent]
        print(f"patched: {names(status.patched)}; not patched: {names(rest)}")
        print("an apply or a revert was interrupted: apply puts in all patches, revert removes all")
        return 1
    if checked := _checked(status):
        print(checked)
    return 0


def _checked(status: TreeStatus) -> str:
    """What the record says of the last `make check` of the tree; empty for an unchecked release."""
    record = read_record(status.root)
    again = f"make check MEGATRON={_quoted(status)}"
    if record is None or record.checked is None:
        return f"not checked: {again}" if status.unreleased else ""
    checked = record.checked
    done = f"checked on {checked.date} by megatron-r3 {checked.version}"
    if checked.not_run:
        done += f" (not run: {', '.join(checked.not_run)})"
    if checked.files != files_digest(status.root):
        return f"{done}, but its files have changed since: {again}"
    return done


def _differ(tree: Unreleased) -> str:
    return f"files that differ from {tree.near}: {names(tree.differ, most=99) or 'none'}"


def _groups(status: TreeStatus) -> str:
    """The groups that are in the tree, or that apply would put there, and the groups left out."""
    rest = names(status.unreleased.left_out if status.unreleased else ())
    return f"groups: {', '.join(status.groups)}" + (f"; left out: {rest}" if rest else "")


def _quoted(status: TreeStatus) -> str:
    return shlex.quote(str(status.root))


def run_megatron(args: argparse.Namespace) -> int:
    """Fetch a tree, or say that the tree is there already."""
    versions = read_versions(patches_of(args))
    default = versions.default.name if args.source == "pypi" else versions.default_line.name
    _, tree = versions.find(args.version or default, args.source)
    if args.source == "git":
        target = args.out / f"megatron-lm-{tree.name.replace(' ', '-')}"
        clone_tree(tree, args.repo, target)
        print(f"{target} is {tree.name} ({tree.commit[:12]}), unpatched")
        return 0
    target = tree_folder(tree, args.out)
    there = target.exists()
    fetch_tree(tree, args.out)
    print(f"{target} {'is already there' if there else f'is {tree.pypi}, unpatched'}")
    return 0


def _done(verb: str, where: str, change: Change) -> str:
    status = change.status
    if not change.files:
        return f"{status.root} is already {status.state.value}: {_tree(status)}, nothing to do"
    half = change.before is TreeState.HALF_APPLIED
    rest = "; the other files were changed before" if half else ""
    return (
        f"{verb} {_size(status)} {where} {status.root} ({_tree(status)}); files changed: "
        f"{len(change.files)}{rest}{_absent(status)}"
    )


def _tree(status: TreeStatus) -> str:
    return f"{status.line.name}, {' or '.join(status.names)}"


def _size(status: TreeStatus) -> str:
    tree = status.unreleased
    num_patches = tree.num_patches if tree else len(status.series.patches)
    return f"{num_patches} patches of {len(status.blobs) - len(status.tree.absent)} files"


def _absent(status: TreeStatus) -> str:
    near = status.unreleased.near if status.unreleased else status.tree.name
    return left_out_of(near, status.absent)


def left_out_of(name: str, absent: tuple[str, ...]) -> str:
    """Text that names the files of the patches that a tree lacks; empty if there are none."""
    return f"; not in {name}, so left out: {', '.join(absent)}" if absent else ""
