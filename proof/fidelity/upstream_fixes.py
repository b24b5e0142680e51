"""`make upstream REPO=CLONE`: test the patches that Megatron-LM itself could merge, in its suite.

    python -m proof.fidelity.upstream_fixes --repo CLONE [--line LINE ...] [--only TEXT ...]

Each patch of the groups engine and fixes has tests in `proof/fidelity/fix_tests/NUMBER.diff`, a
diff of Megatron's own tests/unit_tests. The test files that these diffs touch, and some others
about routers, dispatchers and the engine, run on three copies of a line's commit:

    copy        patches          tests
    plain       none             upstream's
    control     none             upstream's and ours
    fixed       engine, fixes    upstream's and ours

The exit status is 0 if every test that no diff touches ends alike on `fixed` and `plain`, every
other test passes or is skipped on `fixed`, and in each file that a diff touches a test fails on
`control`. As in proof/fidelity/upstream.py, all tests run on CPU tensors and gloo, where many of
upstream's tests cannot pass.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from megatron_r3.patching.apply import apply_series
from megatron_r3.patching.git import PatchingError
from megatron_r3.patching.series import read_series
from megatron_r3.patching.versions import Line, patches_folder, read_versions
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.trees import unpatched_copy
from proof.fidelity.upstream import FOLDER, MOE, Outcomes, Suite, counts, why

LINES = ("core_r0.19.0", "main")
GROUPS = ("engine", "fixes")
# Tests of upstream that no diff touches: of files that the patches change, and of router_trace.py,
# which the patched text generation controller calls.
BESIDE = (
    f"{MOE}/test_router_replay.py",
    f"{MOE}/test_router_trace.py",
    f"{MOE}/test_token_dispatcher.py",
    "inference/contexts/test_kv_block_allocator.py",
    "inference/contexts/test_dynamic_context.py",
    "inference/engines/test_dynamic_engine.py",
    "inference/text_generation_controllers/test_text_generation_controller.py",
)
STAGES = "inference/contexts/test_routing_metadata.py"  # some of its tests need two pipeline stages
COLUMNS = ("plain", "control", "fixed")


def main(argv: list[str] | None = None) -> int:
    """Run the tests of each line; return 1 if a test does not end as it should."""
    parser = argparse.ArgumentParser(prog="upstream_fixes", description=__doc__.splitlines()[0])
    parser.add_argument("--repo", type=Path, required=True, help="a clone of Megatron-LM")
    parser.add_argument("--line", nargs="+", default=LINES, help="release lines")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="test files with one of these texts in their names"
    )
    args = parser.parse_args(argv)
    wrong: list[str] = []
    try:
        for name in args.line:
            wrong += run(read_versions(patches_folder()).line(name), args.repo, args.only)
    except PatchingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*wrong, sep="\n")
    return 1 if wrong else 0


def run(line: Line, repo: Path, only: list[str]) -> list[str]:
    """Run the tests of a line; print a row for each file and new test; return what is wrong."""
    commit = next(tree.commit for tree in line.trees if tree.commit)
    diffs = diffs_of(line)
    with tempfile.TemporaryDirectory(prefix="upstream-") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        plain, _ = unpatched_copy(repo, folder / "plain", commit)
        control, fixed = (shutil.copytree(plain, folder / name) for name in COLUMNS[1:])
        apply_series(fixed, patches_folder(), groups=GROUPS)
        for tree in (control, fixed):
            for diff in diffs:
                subprocess.run(["git", "apply", str(diff)], cwd=tree, check=True)
        suites = {
            tree.name: Suite(stack.enter_context(TreeWorker(tree, ["megatron.training"])), folder)
            for tree in (plain, control, fixed)
        }
        files = chosen({*BESIDE, *(file for diff in diffs for file in touched(diff))}, only)
        print(f"{line.name}, {commit[:8]}: {', '.join(GROUPS)}", flush=True)
        wrong: list[str] = []
        for file in files:
            for ranks in (1, 2) if file == STAGES else (1,):
                ended = {
                    name: suite.run(file, ranks) if _has(suite, file) else {}
                    for name, suite in suites.items()
                }
                ours, not_so = judged(file, ended)
                print(summary(file, ranks, ended), *ours, sep="\n", flush=True)
                wrong += not_so
    return wrong


def chosen(files: Iterable[str], only: list[str]) -> list[str]:
    """The files with one of these texts in their names, sorted.

    Raises:
        PatchingError: no file has one of the texts.
    """
    found = sorted(file for file in files if any(text in file for text in only))
    if not found:
        raise PatchingError(
            f"--only {' '.join(only)}: no test file has such a text in its name; there are "
            f"{', '.join(sorted(files))}"
        )
    return found


def _has(suite: Suite, file: str) -> bool:
    return (suite.worker.tree / FOLDER / file).is_file()


def diffs_of(line: Line) -> list[Path]:
    """The diffs with the tests of a line's patches, in the order of the patches.

    Raises:
        PatchingError: a patch has no diff.
    """
    folder = Path(__file__).with_name("fix_tests")
    patches = [p for p in read_series(line.folder).patches if p.group in GROUPS]
    diffs = [folder / f"{patch.number:04d}.diff" for patch in patches]
    if missing := [diff.name for diff in diffs if not diff.is_file()]:
        raise PatchingError(f"{folder} has no {', '.join(missing)}: each such patch needs tests")
    return diffs


def touched(diff: Path) -> list[str]:
    """The files of tests/unit_tests that a diff changes or adds."""
    return re.findall(rf"^diff --git a/{FOLDER}/(\S+) ", diff.read_text(), re.MULTILINE)


def judged(file: str, ended: dict[str, Outcomes]) -> tuple[list[str], list[str]]:
    """Judge one file: a line for each test of ours, and what is wrong.

    A test counts as ours, added or changed by a diff, if `plain` lacks it or it ends otherwise on
    `control`. A file with tests of ours needs one that fails on `control`.
    """
    plain, control, fixed = (ended[name] for name in COLUMNS)
    ours, wrong = [], []
    for test in sorted({*plain, *fixed}):
        before, without, after = (how.get(test, ("none", ""))[0] for how in (plain, control, fixed))
        if before == without and before != after:
            both = why(plain, test, "plain"), why(fixed, test, "fixed")
            wrong.append("\n".join((f"{file}: {test}", *both)))
        if before != without and after != "none":
            ours.append(f"    {test.rpartition('::')[2]}: {without}, {after}")
            if after not in ("passed", "skipped"):
                wrong.append(f"{file}: {test}\n{why(fixed, test, 'fixed')}")
    if ours and not any(line.endswith("failed, passed") for line in ours):
        wrong.append(f"{file}: none of our tests fails without the patches")
    return ours, wrong


def summary(file: str, ranks: int, ended: dict[str, Outcomes]) -> str:
    """How the tests of one file ended on each copy."""
    said = [f"  {file}, {ranks} rank{'s'[: ranks - 1]}"]
    for name in COLUMNS:
        numbers = ", ".join(f"{n} {how}" for how, n in sorted(counts(ended[name]).items()))
        said.append(f"{name}: {numbers or '-'}")
    return "   ".join(said)


if __name__ == "__main__":
    sys.exit(main())
