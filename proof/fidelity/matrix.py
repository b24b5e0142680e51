"""`make matrix`: run the checks on every release line; print a table, write build/matrix.json.

    python -m proof.fidelity.matrix --out build/matrix.json [--repo CLONE] [--line LINE]

Without --repo the trees are PyPI's packages. With --repo they are commits of CLONE, which have
upstream's own pretrain_gpt.py too. patches/versions.toml names the packages and the commits. The
newest tree of each line is checked; with --line each tree of that line.

Without --repo and --line two checks, `replay` and `engine`, are left out on the default tree, for
which `make test-all` has tests. The other trees share the cases of `replay`: each case runs on one
tree. As many trees as there are cores are checked at a time. Exit status 0 says that no check
failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from keepers.clone import check_clone, has_commit, resolve
from megatron_r3.patching.fetch import fetch_tree
from megatron_r3.patching.git import PatchingError
from megatron_r3.patching.versions import (
    KnownTree,
    Line,
    Versions,
    patches_folder,
    read_versions,
)
from proof.fidelity.cases import Case
from proof.fidelity.engine_check import engine
from proof.fidelity.line_checks import CHECKS as CHECKS_OF_TRAINING
from proof.fidelity.line_checks import QUICK, Checked, Result
from proof.fidelity.trees import ROOT

CHECKS: dict[str, Callable[[Checked], Result]] = {**CHECKS_OF_TRAINING, "engine": engine}
IN_TESTS = ("replay", "engine")


def main(argv: list[str] | None = None) -> int:
    """Run the checks of the lines that were asked for."""
    parser = argparse.ArgumentParser(prog="matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--repo", type=Path, help="a clone of Megatron-LM with the release tags")
    parser.add_argument("--line", default="", help="one release line only")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    args = parser.parse_args(argv)
    begin = time.monotonic()
    try:
        versions = read_versions(patches_folder())
        trees = [*_trees(versions, args.line, args.repo)]
        if not trees:
            where = (
                "has no commit in patches/versions.toml"
                if args.repo
                else "is not on PyPI: give --repo CLONE"
            )
            raise PatchingError(f"nothing to check: {args.line or 'every line'} {where}")
    except PatchingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{'release line':14} {'tree':18}" + "".join(f"{name:>16}" for name in CHECKS))
    results = []
    # Processes are spawned, because a process that is forked from one with threads may hang.
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(os.sched_getaffinity(0)), len(trees)), spawned) as pool:
        asked = bool(args.line or args.repo)
        checks = [[*CHECKS] if asked else checks_of(versions, tree) for _, tree, *_ in trees]
        older = [(line, source) for line, tree, source, _ in trees if tree != versions.default]
        dealt = iter(shared_out(older))
        cases = [
            QUICK if asked else () if tree == versions.default else next(dealt)
            for _, tree, *_ in trees
        ]
        for row in pool.map(_run, *zip(*trees, strict=True), checks, cases):
            results += row
            print(line_of(row), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    failed = [result for result in results if result["passed"] is False]
    for result in failed:
        print(f"\nFAILED {result['check']} on {result['tree']}:\n{result['detail']}")
    passed = sum(result["passed"] is True for result in results)
    print(
        f"{passed} of {len(results)} checks passed on {len(trees)} trees "
        f"in {time.monotonic() - begin:.0f} s: {args.out}"
    )
    return 1 if failed else 0


def _trees(
    versions: Versions, only: str, repo: Path | None
) -> Iterator[tuple[Line, KnownTree, Path, str]]:
    """Each tree to check: its line, the tree, the git repository that holds it, its commit there.

    Without `only` a line has its newest tree alone: older releases differ from it in a few lines of
    code, and would double the time of CI.
    """
    if repo is not None:
        check_clone(repo)
    for line in [versions.line(only)] if only else versions.lines:
        trees = [tree for tree in line.trees if (tree.pypi if repo is None else tree.commit)]
        for tree in trees if only else trees[:1]:
            if repo is None:
                source = fetch_tree(tree, ROOT / "build")
                yield line, tree, source, resolve(source, "HEAD")
            else:
                if not has_commit(repo, tree.commit):
                    raise PatchingError(
                        f"{repo} has no {tree.name} ({tree.commit[:12]}): git fetch --tags there"
                    )
                yield line, tree, repo, tree.commit


def checks_of(versions: Versions, tree: KnownTree) -> list[str]:
    """The names of a tree's checks where neither --repo nor --line is given."""
    in_tests = IN_TESTS if tree == versions.default else ()
    return [name for name in CHECKS if name not in in_tests]


def shared_out(trees: Sequence[tuple[Line, Path]]) -> list[tuple[Case, ...]]:
    """Share the quick cases out to the trees: each case goes to one tree that can run it.

    Example with the cases 0 to 4: of four trees the first cannot run case 1, and no tree can run
    case 4. Then the trees get the cases 0; 1; 2; 3.
    """
    shares: list[list[Case]] = [[] for _ in trees]
    for case in QUICK:
        able = [
            share
            for share, (line, source) in zip(shares, trees, strict=True)
            if case.runs_on(source, line.name)
        ]
        if able:
            min(able, key=len).append(case)
    return [tuple(share) for share in shares]


def _run(
    line: Line,
    tree: KnownTree,
    source: Path,
    commit: str,
    names: list[str],
    cases: tuple[Case, ...],
) -> list[dict[str, object]]:
    """Run the checks of these names on one tree, and return their results."""
    results: list[dict[str, object]] = []
    with ExitStack() as open_:
        folder = open_.enter_context(tempfile.TemporaryDirectory(prefix="matrix-"))
        checked = open_.enter_context(Checked(line, tree, source, commit, Path(folder), cases))
        for name in names:
            begin = time.monotonic()
            passed, detail = CHECKS[name](checked)
            results.append(
                {
                    "line": line.name,
                    "tree": tree.name,
                    "check": name,
                    "passed": passed,
                    "seconds": round(time.monotonic() - begin, 1),
                    "detail": detail,
                }
            )
    return results


def line_of(row: list[dict[str, object]]) -> str:
    """The line of the printed table with the results of one tree."""
    cells = (
        f"{'none':>16}"
        if r["passed"] is None
        else f"{'ok' if r['passed'] else 'FAILED':>8} {r['seconds']:5.0f} s"
        for r in row
    )
    left_out = [f"{'make test-all':>16}"] * (len(CHECKS) - len(row))
    return f"{row[0]['line']:14} {row[0]['tree']:18}" + "".join([*cells, *left_out])


if __name__ == "__main__":
    sys.exit(main())
