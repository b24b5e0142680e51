"""`python -m keepers.patches`: check the patches, write them from commits, start a release line.

    python -m keepers.patches verify REPO [--line LINE]
    python -m keepers.patches export TREE [--line LINE] [--check]
    python -m keepers.patches bump OLD NEW --repo CLONE [--name LINE]

`make verify`, `make export` and `make bump` run these commands.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from keepers.bump import bump_line
from keepers.export import export_series
from keepers.verify import TreeCheck, check_rules, verify_repo
from megatron_r3.cli import run_command
from megatron_r3.patching.git import PatchingError, names
from megatron_r3.patching.patches_cli import add_command, left_out_of, patches_of
from megatron_r3.patching.versions import read_versions


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 if it did what was asked, 1 if it refused and said why."""
    parser = argparse.ArgumentParser(prog="keepers.patches", description=__doc__.splitlines()[0])
    parser.set_defaults(group=parser)
    commands = parser.add_subparsers(metavar="COMMAND")
    argument = add_command(
        commands, "verify", run_verify, "check the patches against the commits of a repository"
    )
    argument("repo", type=Path, metavar="REPO", help="a Megatron-LM clone, bare or not")
    argument("--line", default="", help="release line to check (default: all)")

    argument = add_command(
        commands, "export", run_export, "write the commits of a checkout as a line's patches"
    )
    argument("tree", type=Path, metavar="TREE", help="a checkout that has the patches as commits")
    argument("--line", default="", help="release line (default: that of the nearest known commit)")
    hint = "write nothing; exit with 1 if a byte would change"
    argument("--check", action="store_true", help=hint)

    argument = add_command(
        commands, "bump", run_bump, "start a release line: carry patches to a new upstream commit"
    )
    argument("old", metavar="OLD", help="release line whose patches are carried")
    argument("new", metavar="NEW", help="tag or commit that the patches are carried to")
    hint = "Megatron-LM clone that has NEW"
    argument("--repo", type=Path, required=True, metavar="CLONE", help=hint)
    hint = "name of the new line (default: core_r0.20.0 for the tag core_v0.20.0)"
    argument("--name", default="", metavar="LINE", help=hint)
    return run_command(parser, argv)


def run_verify(args: argparse.Namespace) -> int:
    """Print one line for each known tree, then each rule that a patch breaks."""
    versions = read_versions(patches_of(args))
    checks = verify_repo(args.repo, versions, args.line)
    for check in checks:
        print(f"{check.line.name}, {check.tree.name}: {_result(check)}")
    broken = check_rules(versions, args.line)
    for rule in broken:
        print(rule)
    failed = [check.tree.name for check in checks if check.error]
    if failed or broken:
        trees = f"trees that failed: {names(failed)}" if failed else "no tree failed"
        raise PatchingError(f"{trees}; rules broken: {len(broken)}")
    if not any(check.verified for check in checks):
        raise PatchingError(
            f"{args.repo} has the commit or the files of no known tree: nothing was checked; fetch "
            "the commits there first"
        )
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Print which patches were written; refuse if --check finds that a patch would change."""
    done = export_series(args.tree, patches_of(args), line=args.line, check=args.check)
    differ = names(done.differ, most=99)
    if args.check and done.differ:
        raise PatchingError(
            f"{args.tree} exports other patches than {done.folder} has: {differ} (without --check, "
            "or without CHECK=1, they are written)"
        )
    if done.differ:
        print(f"{len(done.names)} patches in {done.folder}; changed: {differ}")
    else:
        print(f"{done.folder} is what {args.tree} exports: {len(done.names)} patches, every byte")
    return 0


def run_bump(args: argparse.Namespace) -> int:
    """Print what the new line has, which patches it lacks, and what to do next."""
    patches = patches_of(args)
    done = bump_line(args.old, args.new, args.repo, patches, line=args.name)
    made = "was there already" if done.again else f"is new, from {args.old}"
    print(f"{done.line} {made}: {len(done.names)} patches in {patches / done.line}")
    if done.left_out:
        print(f"patches of {args.old} that {done.line} lacks: {names(done.left_out, most=99)}")
    print(f"next: make verify REPO={args.repo} LINE={done.line}, then make matrix")
    return 0


def _result(check: TreeCheck) -> str:
    if check.error:
        return f"FAILED: {check.error}"
    if (done := check.verified) is None:
        return "not checked, the clone lacks this tree's commit or files"
    return (
        f"{done.num_patches} patches of {done.num_files} files, applied and taken back to the byte"
        f"{left_out_of(check.tree.name, check.tree.absent)}"
    )


if __name__ == "__main__":
    sys.exit(main())
