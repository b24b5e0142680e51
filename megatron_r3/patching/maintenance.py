"""The commands of those who keep the patches: verify, export and bump."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_r3.patching.bump import bump_line
from megatron_r3.patching.errors import PatchingError, names
from megatron_r3.patching.export import export_series
from megatron_r3.patching.matrix import patches_folder, read_matrix
from megatron_r3.patching.verify import TreeCheck, check_rules, verify_repo

__all__ = ["add_maintenance"]


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
