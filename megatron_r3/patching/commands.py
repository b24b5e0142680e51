"""The commands apply, revert, status and megatron; each returns 0, or 1 for a refusal."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_r3.patching.apply import Change, apply_series, revert_series, why_not
from megatron_r3.patching.errors import names
from megatron_r3.patching.fetch import UPSTREAM, clone_tree, fetch_tree, tree_folder
from megatron_r3.patching.matrix import patches_folder, read_matrix
from megatron_r3.patching.tree import TreeState, TreeStatus, identify

__all__ = ["add_commands"]


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the commands; each sets `run`, which takes the parsed arguments."""
    for name, run, text in (
        ("apply", run_apply, "patch a Megatron-LM tree"),
        ("revert", run_revert, "take the patches back out of a tree"),
        ("status", run_status, "say which tree it is and how far it is patched; 1 if not known"),
    ):
        parser = subparsers.add_parser(name, help=text, description=text)
        parser.add_argument("tree", type=Path, metavar="DIR", help="a Megatron-LM tree")
        parser.add_argument(
            "--line", default="", help="its release line (default: known by its files)"
        )
        _add_patches(parser)
        parser.set_defaults(run=run)
    text = "fetch a known Megatron tree"
    parser = subparsers.add_parser("megatron", help=text, description=text)
    parser.add_argument(
        "--version",
        metavar="NAME",
        help="a release line or a tree (default: that of versions.toml)",
    )
    text = "its source package, or its commit (default: pypi)"
    parser.add_argument("--source", choices=("pypi", "git"), default="pypi", help=text)
    text = "the git repository to fetch the commit from (default: upstream's)"
    parser.add_argument("--repo", default=UPSTREAM, metavar="URL", help=text)
    parser.add_argument(
        "--out", type=Path, default=Path("build"), help="folder to put it in (default: build)"
    )
    _add_patches(parser)
    parser.set_defaults(run=run_megatron)


def _add_patches(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--patches", type=Path, metavar="DIR", help="default: those that came with megatron-r3"
    )


def run_apply(args: argparse.Namespace) -> int:
    """Apply the patches and say what was done."""
    change = apply_series(args.tree, args.patches or patches_folder(), line=args.line)
    print(_done("applied", "to", change))
    return 0


def run_revert(args: argparse.Namespace) -> int:
    """Take the patches back and say what was done."""
    change = revert_series(args.tree, args.patches or patches_folder(), line=args.line)
    print(_done("reverted", "in", change))
    return 0


def run_status(args: argparse.Namespace) -> int:
    """Print the state first, as one word for scripts, then what it means."""
    matrix = read_matrix(args.patches or patches_folder())
    status = identify(args.tree, matrix, args.line)
    print(f"{status.state.value}: {status.root}")
    if status.state is TreeState.UNKNOWN:
        print(why_not(status, matrix))
        return 1
    print(f"{_tree(status)}, {_size(status)}{_skipped(status)}")
    if status.state is TreeState.HALF_APPLIED:
        rest = [p for p in status.files if p not in status.patched and p not in status.tree.absent]
        print(f"patched: {names(status.patched)}; not patched: {names(rest)}")
        print("an apply or a revert was interrupted: apply finishes it, revert undoes it")
        return 1
    return 0


def run_megatron(args: argparse.Namespace) -> int:
    """Fetch a tree, or say that it is there."""
    matrix = read_matrix(args.patches or patches_folder())
    default = matrix.default.name if args.source == "pypi" else matrix.default_line.name
    _, tree = matrix.find(args.version or default, args.source)
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
    rest = ", the others were done before" if change.before is TreeState.HALF_APPLIED else ""
    return (
        f"{verb} {_size(status)} {where} {status.root} ({_tree(status)}); "
        f"files changed: {len(change.files)}{rest}{_skipped(status)}"
    )


def _tree(status: TreeStatus) -> str:
    return f"{status.line.name}, {' or '.join(status.names)}"


def _size(status: TreeStatus) -> str:
    num_files = len(status.blobs) - len(status.tree.absent)
    return f"{len(status.series.patches)} patches of {num_files} files"


def _skipped(status: TreeStatus) -> str:
    absent = status.tree.absent
    return f"; skipped, {status.tree.name} has no such file: {', '.join(absent)}" if absent else ""
