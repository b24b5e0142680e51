"""The commands apply, revert, status and megatron; each returns 0, or 1 for a refusal."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_r3.patching.apply import Change, apply_series, revert_series, why_not
from megatron_r3.patching.bump import bump_line
from megatron_r3.patching.export import export_series
from megatron_r3.patching.fetch import UPSTREAM, clone_tree, fetch_tree, tree_folder
from megatron_r3.patching.git import PatchingError, names
from megatron_r3.patching.tree import TreeState, TreeStatus, identify
from megatron_r3.patching.verify import TreeCheck, check_rules, verify_repo
from megatron_r3.patching.versions import patches_folder, read_matrix


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


# The commands of those who keep the patches: verify, export and bump.


def add_maintenance(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the commands; each sets `run`, which takes the parsed arguments."""
    text = "check the series of every release line against the commits in a git repository"
    parser = subparsers.add_parser("verify", help=text, description=text)
    parser.add_argument("repo", type=Path, metavar="REPO", help="a clone, bare or not")
    parser.add_argument("--line", default="", help="one release line (default: all)")
    parser.set_defaults(run=run_verify)

    text = "write the commits of a checkout as the patches of a release line"
    parser = subparsers.add_parser("export", help=text, description=text)
    parser.add_argument("tree", type=Path, metavar="TREE", help="a checkout, patches committed")
    parser.add_argument("--line", default="", help="default: that of the nearest known commit")
    parser.add_argument("--base", default="", metavar="REV", help="default: the nearest known one")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; 1 if a byte would change"
    )
    parser.set_defaults(run=run_export)

    text = "start a release line: bring the patches of another one to a new upstream commit"
    parser = subparsers.add_parser("bump", help=text, description=text)
    parser.add_argument("old", metavar="OLD", help="the line that the patches are taken from")
    parser.add_argument("new", metavar="NEW", help="a tag or commit of the clone")
    parser.add_argument("--repo", type=Path, required=True, metavar="CLONE", help="of upstream")
    parser.add_argument(
        "--name", default="", metavar="LINE", help="default: core_r0.20.0 for core_v0.20.0"
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="where to work (default: build/bump/LINE)"
    )
    parser.set_defaults(run=run_bump)
    for name in ("verify", "export", "bump"):
        subparsers.choices[name].add_argument(
            "--patches", type=Path, metavar="DIR", help="default: those that came with megatron-r3"
        )


def run_verify(args: argparse.Namespace) -> int:
    """Print one line for each known tree, then each rule that a patch breaks."""
    matrix = read_matrix(args.patches or patches_folder())
    checks = verify_repo(args.repo, matrix, args.line)
    for check in checks:
        print(f"{check.line.name}, {check.tree.name}: {_result(check)}")
    broken = check_rules(matrix, args.line)
    for what in broken:
        print(what)
    failed = [check.tree.name for check in checks if check.error]
    if failed or broken:
        trees = f"trees that failed: {names(failed)}" if failed else "no tree failed"
        raise PatchingError(f"{trees}; rules broken: {len(broken)}")
    if not any(check.verified for check in checks):
        raise PatchingError(f"{args.repo} has the base of no known tree: nothing was checked")
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Say which patches were written, or differ."""
    patches = args.patches or patches_folder()
    done = export_series(args.tree, patches, line=args.line, base=args.base, check=args.check)
    if args.check and done.differ:
        raise PatchingError(
            f"{done.folder} is not what {args.tree} exports: {names(done.differ, most=99)}"
        )
    if not done.differ:
        print(f"{done.folder} is what {args.tree} exports: {len(done.names)} patches, every byte")
        return 0
    print(f"{len(done.names)} patches in {done.folder}; changed: {names(done.differ, most=99)}")
    return 0


def run_bump(args: argparse.Namespace) -> int:
    """Say what the new line is, and what to do next."""
    patches = args.patches or patches_folder()
    done = bump_line(args.old, args.new, args.repo, patches, line=args.name, work=args.work)
    made = "was there already" if done.again else f"is new, from {args.old}"
    print(f"{done.line} {made}: {len(done.names)} patches in {patches / done.line}")
    if done.left_out:
        print(f"not in it: {names(done.left_out, most=99)}")
    print(f"next: megatron-r3 verify {args.repo} --line {done.line}, then make matrix")
    return 0


def _result(check: TreeCheck) -> str:
    if check.error:
        return f"FAILED: {check.error}"
    if (done := check.verified) is None:
        return "not checked, its base is not there"
    absent = check.tree.absent
    skipped = f"; skipped, no such file: {', '.join(absent)}" if absent else ""
    return (
        f"{done.num_patches} patches of {done.num_files} files, tree {done.base_tree[:12]} to "
        f"{done.patched_tree[:12]} and back{skipped}"
    )
