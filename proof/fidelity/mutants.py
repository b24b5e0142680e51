"""`make mutants`: put faults into the package, one at a time, and see which tests fail.

    python -m proof.fidelity.mutants [--only TEXT ...] [--unit] [--jobs N] [--out FILE.json]

The faults are in `tests/mutants/ROOM.toml`. Each fault has a text of the package, the text that
replaces it, what the fault does to a user, and tests, of which one at least must notice it. A fault
names no file or line, so it moves with the code; its text must be in the package exactly once. Each
fault is put into a copy of what is committed or staged. The unit tests run first; if all pass, the
functional tests run too (not with --unit). Before any fault, the same tests must pass without one.
A fault ends as

    unit          a unit test noticed it
    functional    only a functional test noticed it
    survived      no test noticed it: the exit status is 1
    unseen        no test noticed it, and the file says why none can

Tests that run for LIMIT_S seconds count as failed. Only tests that `make test` runs are used.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import tomllib

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "tests" / "mutants"
LIMIT_S = 600
COLUMNS = ("unit", "functional", "survived", "unseen")
T = TypeVar("T")


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        room: the name of the fault's file in `tests/mutants`, without `.toml`.
        name: what is wrong; unique in its room.
        effect: what the fault does to a user.
        old, new: a text that the package has once, and the text that replaces it.
        tests, functional: arguments of pytest: the unit tests, and tests that run patched trees.
        unseen: why no test can notice the fault; empty for a fault that must be noticed.
    """

    room: str
    name: str
    effect: str
    old: str
    new: str
    tests: tuple[str, ...]
    functional: tuple[str, ...]
    unseen: str = ""


def read_faults(folder: Path = FAULTS) -> list[Fault]:
    """The faults of all rooms.

    Raises:
        ValueError: a fault lacks a field, or two faults of a room have the same name.
    """
    faults: dict[tuple[str, str], Fault] = {}
    for file in sorted(folder.glob("*.toml")):
        room = tomllib.loads(file.read_text())
        for entry in room["mutant"]:
            lists = {key: tuple(entry.get(key, room[key])) for key in ("tests", "functional")}
            try:
                fault = Fault(**{**entry, **lists, "room": file.stem})
            except TypeError as error:
                raise ValueError(f"{file.name}: {entry.get('name')}: {error}") from error
            if faults.setdefault((fault.room, fault.name), fault) is not fault:
                raise ValueError(f"{file.name}: two faults are called {fault.name!r}")
    return list(faults.values())


def place_of(fault: Fault, root: Path = ROOT) -> Path:
    """The file of the package that has the fault's old text, relative to `root`.

    Raises:
        ValueError: no file has the text, or the package has it more than once.
    """
    files = sorted((root / "megatron_r3").rglob("*.py"))
    found = [file for file in files for _ in range(file.read_text().count(fault.old))]
    if len(found) != 1:
        where = ", ".join(str(file.relative_to(root)) for file in found) or "nowhere"
        raise ValueError(
            f"{fault.room}: {fault.name}: `old` must be there once in megatron_r3; found: {where}"
        )
    return found[0].relative_to(root)


class Copy:
    """A copy of the repository, into which faults are put one at a time.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = ["git", "checkout-index", "--all", f"--prefix={folder}/"]
        subprocess.run(command, cwd=ROOT, check=True)
        (folder / "build").symlink_to(ROOT / "build")
        self.writes = 0

    def write(self, file: Path, text: str) -> None:
        """Write a file, so that Python does not run an older .pyc of it.

        Python runs an older .pyc if the source still has the size and the time, in seconds, that
        the .pyc names. `2 * x` and `3 * x` have the same size, and a small test takes less than a
        second. So each write sets another time.
        """
        file.write_text(text)
        self.writes += 1
        os.utime(file, (self.writes, self.writes))

    def notices(self, fault: Fault, tests: Sequence[str]) -> bool:
        """Whether tests fail, or run for LIMIT_S seconds, with this fault in the package.

        Raises:
            ValueError: pytest could not run the tests.
        """
        if not tests:
            return False
        file = self.folder / place_of(fault, self.folder)
        whole = file.read_text()
        self.write(file, whole.replace(fault.old, fault.new))
        try:
            status, printed = self._pytest(tests, LIMIT_S)
        except subprocess.TimeoutExpired:
            return True
        finally:
            self.write(file, whole)
        # 2: a test file could not be imported; 5: `make test` runs none of the tests
        if status not in (0, 1, 2, 5):
            raise ValueError(f"pytest {' '.join(tests)}: {printed}")
        return status in (1, 2)

    def refuse_failing(self, tests: Sequence[str]) -> None:
        """Refuse tests that fail without a fault.

        Raises:
            ValueError: one of the tests fails, or pytest could not run them.
        """
        status, printed = self._pytest(tests, None)
        if status not in (0, 5):
            raise ValueError(f"without a fault these tests must pass:\n{printed}")

    def _pytest(self, tests: Sequence[str], limit_s: int | None) -> tuple[int, str]:
        """Run tests up to the first failure; return pytest's exit status and its last words."""
        options = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not slow")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            timeout=limit_s,
            check=False,
        )
        return done.returncode, done.stdout.decode(errors="replace")[-500:]


def outcome(copy: Copy, fault: Fault, unit_alone: bool) -> str:
    """How a fault ends: one of COLUMNS."""
    if copy.notices(fault, fault.tests):
        return "unit"
    if not unit_alone and copy.notices(fault, fault.functional):
        return "functional"
    return "unseen" if fault.unseen else "survived"


def run(faults: Sequence[Fault], jobs: int, unit_alone: bool) -> Iterator[tuple[Fault, str]]:
    """Try the faults; yield each with its `outcome`, in the order of `faults`.

    Raises:
        ValueError: tests fail without a fault.
    """
    free: SimpleQueue[Copy] = SimpleQueue()

    def in_a_copy(ask: Callable[[Copy], T]) -> T:
        copy = free.get()
        try:
            return ask(copy)
        finally:
            free.put(copy)

    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        for number in range(jobs):
            (folder := Path(scratch) / str(number)).mkdir()
            free.put(Copy(folder))
        with ThreadPoolExecutor(jobs) as pool:
            named = {test for f in faults for test in f.tests}
            named |= set() if unit_alone else {test for f in faults for test in f.functional}
            shares = [sorted(named)[job::jobs] for job in range(min(jobs, len(named)))]
            list(pool.map(lambda share: in_a_copy(lambda copy: copy.refuse_failing(share)), shares))
            ends = pool.map(lambda f: in_a_copy(lambda copy: outcome(copy, f, unit_alone)), faults)
            yield from zip(faults, ends, strict=True)


def table(ended: Sequence[tuple[Fault, str]]) -> str:
    """The printed table: for each room, how many faults ended in each way."""
    rooms = dict.fromkeys(fault.room for fault, _ in ended)
    lines = [f"{'room':12} {'faults':>7} " + " ".join(f"{name:>10}" for name in COLUMNS)]
    for room in [*rooms, "all"]:
        here = [how for fault, how in ended if room in (fault.room, "all")]
        numbers = " ".join(f"{here.count(name):10}" for name in COLUMNS)
        lines.append(f"{room:12} {len(here):7} {numbers}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Try the faults; return 1 if a fault survived that tests must notice."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=[""], help="faults whose `ROOM: NAME` has one of these texts"
    )
    parser.add_argument("--unit", action="store_true", help="leave the functional tests out")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    args = parser.parse_args(argv)
    try:
        faults = [
            fault
            for fault in read_faults()
            if any(text in f"{fault.room}: {fault.name}" for text in args.only)
        ]
        if not faults:
            raise ValueError(f"--only {' '.join(args.only)}: no fault's `ROOM: NAME` has this text")
        ended = []
        for fault, how in run(faults, args.jobs, args.unit):
            ended.append((fault, how))
            print(f"{how:11} {fault.room}: {fault.name}", flush=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\n{table(ended)}")
    if args.out:
        rows = [{**asdict(fault), "caught": how} for fault, how in ended]
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if any(how == "survived" for _, how in ended) else 0


if __name__ == "__main__":
    sys.exit(main())
