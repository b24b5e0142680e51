"""`make check MEGATRON=DIR`: test a patched tree, above all one that is no release.

    python -m proof.fidelity.check DIR [--only TEXT]

The checks run on two copies of DIR's files: one as they are now, one with the patches reverted.
Exit status 0 says that no check failed; DIR's record (`megatron_r3.patching.record`) then has
today's date and a digest of the files, unless --only left some checks out. 1 says that a check
failed, and removes an earlier pass from the record. 2 says that DIR cannot be checked.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import megatron_r3
from megatron_r3.patching.apply import apply_series, revert_series
from megatron_r3.patching.git import PatchingError, names
from megatron_r3.patching.record import (
    NAME,
    CheckedOn,
    Record,
    files_digest,
    read_record,
    record_path,
    write_record,
)
from megatron_r3.patching.tree import TreeState, TreeStatus, identify
from megatron_r3.patching.tree_files import locked
from megatron_r3.patching.versions import patches_folder, read_versions
from proof.fidelity import line_checks
from proof.fidelity.line_checks import Copies, Result, files_and_modes
from proof.fidelity.upstream import FOLDER, MOE, Outcomes, Suite, counts, differing, why

# What `make_copies` copies beside a tree's top-level scripts: the package, and what upstream's unit
# tests need. A checkout may also hold data and checkpoints, which are not copied.
COPIED = ("megatron", "tests/unit_tests", "tests/test_utils", "tests/__init__.py")
Checks = dict[str, Callable[[Copies], Result]]
TESTS = tuple(f"{MOE}/test_{name}.py" for name in ("router_replay", "routers", "moe_layer"))


def main(argv: list[str] | None = None) -> int:
    """Check one tree and record the result."""
    parser = argparse.ArgumentParser(prog="check", description=str(__doc__).splitlines()[0])
    parser.add_argument("tree", type=Path, metavar="DIR", help="a patched Megatron-LM tree")
    parser.add_argument(
        "--only", default="", help="checks with this text in their names; a pass is not recorded"
    )
    args = parser.parse_args(argv)
    begin = time.monotonic()
    checks = {name: check for name, check in CHECKS.items() if args.only in name}
    if not checks:
        parser.error(f"no check has {args.only!r} in its name: {', '.join(CHECKS)}")
    try:
        status = _applied(args.tree)
        with tempfile.TemporaryDirectory(prefix="check-") as folder:
            name = f"{status.line.name}, {' or '.join(status.names)}"
            print(f"checking {status.root} ({name})")
            copies = make_copies(status, Path(folder))
            digest = files_digest(copies.patched)
            with copies:
                failed, not_run = run(checks, copies)
        seconds = f"{time.monotonic() - begin:.0f} s"
        whole = checks.keys() == CHECKS.keys()
        if failed or whole:
            today = datetime.now(timezone.utc).date().isoformat()
            passed = CheckedOn(today, digest, megatron_r3.__version__, tuple(not_run))
            remember(status.root, None if failed else passed)
    except (PatchingError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if failed:
        print(f"FAILED in {seconds}: {', '.join(failed)}; do not train on this tree")
        return 1
    recorded = f"recorded in {record_path(status.root)}" if whole else "not recorded: not all ran"
    num = len(checks) - len(not_run)
    print(f"{num} of {len(CHECKS)} checks passed in {seconds}; {recorded}")
    return 0


def _applied(root: Path) -> TreeStatus:
    """The status of a patched tree.

    Raises:
        PatchingError: the tree is in another state.
    """
    status = identify(root, read_versions(patches_folder()))
    if status.state is not TreeState.APPLIED:
        raise PatchingError(
            f"{status.root} is {status.state.value}, and only a patched tree can be checked: "
            f"make apply MEGATRON={status.root} first"
        )
    return status


def make_copies(status: TreeStatus, folder: Path) -> Copies:
    """Copy a patched tree twice, and revert the patches in the second copy."""
    copies = Copies(status.line, ", ".join(status.names), folder)
    for path in (*COPIED, *(script.name for script in status.root.glob("*.py"))):
        source, target = status.root / path, copies.patched / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target, symlinks=True, ignore=ignore)
        elif source.is_file():
            shutil.copy2(source, target)
    write_record(copies.patched, Record(status.unreleased))
    shutil.copytree(copies.patched, copies.unpatched, symlinks=True)
    revert_series(copies.unpatched, patches_folder())
    return copies


def run(checks: Checks, copies: Copies) -> tuple[list[str], list[str]]:
    """Run and print the checks; return the names of the failed ones, and of those not run."""
    failed: dict[str, str] = {}
    not_run: list[str] = []
    for name, check in checks.items():
        begin = time.monotonic()
        print(f"{name:18}", end="", flush=True)
        passed, detail = check(copies)
        word = "not run" if passed is None else "ok" if passed else "FAILED"
        first = detail.partition("\n")[0]
        print(f"{word:8} {time.monotonic() - begin:4.0f} s  {first:.160}", flush=True)
        if passed is None:
            not_run.append(name)
        elif not passed:
            failed[name] = detail
    for name, detail in failed.items():
        print(f"\nFAILED {name}:\n{detail}")
    return list(failed), not_run


def again(copies: Copies) -> Result:
    """Check that the reverted copy, patched again, equals the patched copy byte for byte."""
    third = copies.folder / "again"
    shutil.copytree(copies.unpatched, third, symlinks=True)
    try:
        record = read_record(copies.patched)
        groups = record.tree.groups if record and record.tree else ()
        options = {"line": copies.line.name, "unreleased": True, "groups": groups}
        applied = apply_series(third, copies.line.folder.parent, **options)
    except PatchingError as error:
        return False, str(error)
    want, got = (
        {path: file for path, file in files_and_modes(tree).items() if path != f".{NAME}"}
        for tree in (copies.patched, third)
    )
    differ = [path for path in want.keys() | got.keys() if want.get(path) != got.get(path)]
    if differ:
        return False, f"files that differ from the tree's: {names(sorted(differ))}"
    return True, f"{len(applied.files)} files, every byte"


def upstreams_tests(copies: Copies) -> Result:
    """Check that upstream's own tests in TESTS end alike on the unpatched and the patched copy."""
    files = [file for file in TESTS if (copies.patched / FOLDER / file).is_file()]
    if not files:
        return None, f"the tree has no {FOLDER / MOE}; packages of PyPI have none"
    suites = [
        Suite(copies.worker(tree), copies.folder) for tree in (copies.unpatched, copies.patched)
    ]
    said, wrong, passes, first = [], [], 0, ""
    for file in files:
        with ThreadPoolExecutor() as pool:  # each tree has a process of its own
            unpatched, patched = pool.map(lambda suite, f=file: suite.run(f, 1), suites)
        said.append(f"{Path(file).name} {_counted(unpatched)}")
        passes += counts(unpatched)["passed"]
        first = first or why(unpatched, next(iter(unpatched), file), "the first")
        for test in differing(unpatched, patched):
            both = (why(unpatched, test, "unpatched"), why(patched, test, "patched"))
            wrong.append("\n".join((test, *both)))
    if wrong:
        return False, "\n".join(wrong)
    if not passes:  # for example because a fixture needs Transformer Engine, which is missing
        return None, f"no test passes on the unpatched tree either; {first.strip()}"
    return True, f"alike: {'; '.join(said)}"


def _counted(outcomes: Outcomes) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts(outcomes).items()))


CHECKS: Checks = {
    "apply again": again,
    "off": line_checks.off,
    "RouterReplay": line_checks.router_replay,
    "record, replay": line_checks.record_replay,
    "replay": line_checks.replay,
    "upstream's tests": upstreams_tests,
}


def remember(root: Path, checked: CheckedOn | None) -> None:
    """Write the result of the checks into the record of `root`; None: a check failed."""
    with locked(root):
        record = read_record(root) or Record()
        write_record(root, replace(record, checked=checked))


if __name__ == "__main__":
    sys.exit(main())
