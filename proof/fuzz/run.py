"""Feed the code bad input, thousands of times.

    python -m proof.fuzz.run --tries N --seed S [--only CLASS [--again LETTERS]]

The table has the number of tries of each class and outcome (docs/fuzz.md). The exit status is 1 if
there is a fault: input was accepted wrongly or refused wrongly, the code crashed or hung, or an
error was not one clear line. A class ends at its first fault, and prints it.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

from proof.fuzz.outcome import OUTCOMES, Fault, noted
from proof.fuzz.search import Kind, blob_of, search, steps_of

# classes that wait for other processes come first, because they take longest
CLASSES = ("signals", "trees", "shards", "responses", "prompts", "configs")
_MEMORY = 1 << 30  # by how many bytes a class may grow: no input may make its reader fill memory


def load(name: str) -> Kind:
    """The class of tries with this name: `KIND` of the module `proof.fuzz.NAME`."""
    kind: Kind = import_module(f"proof.fuzz.{name}").KIND
    return kind


def shares(tries: int, kinds: Sequence[Kind]) -> list[int]:
    """How many of all tries each class gets, at least one; the largest class gets the rest."""
    total = sum(kind.share for kind in kinds)
    counts = [max(1, tries * kind.share // total) for kind in kinds]
    largest = max(range(len(kinds)), key=lambda i: counts[i])
    counts[largest] = max(1, counts[largest] + tries - sum(counts))
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tries and print the table; return 1 if there is a fault."""
    parser = argparse.ArgumentParser(prog="python -m proof.fuzz.run", description=__doc__)
    add = parser.add_argument
    add("--tries", type=int, default=10_000, help="of all classes together (default: 10000)")
    add("--seed", type=int, default=0, help="the same seed makes the same tries (default: 0)")
    add("--only", metavar="CLASS", help=f"one of {', '.join(CLASSES)}")
    add("--again", metavar="LETTERS", default="", help="repeat only the try with these letters")
    text = "where the input of each fault is kept (default: build/fuzz)"
    add("--out", type=Path, default=Path("build/fuzz"), metavar="DIR", help=text)
    args = parser.parse_args(argv)
    if args.only and args.only not in CLASSES:
        parser.error(f"--only {args.only}: must be one of {', '.join(CLASSES)}")
    if args.again and not args.only:
        parser.error("--again repeats a try of one class: give --only CLASS too")
    place = args.out.absolute()
    if args.only:
        kind = load(args.only)
        faulthandler.enable()
        if kind.attempt:  # the code under test runs in this process, not in a command's
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        return run_one(kind, max(1, args.tries), args.seed, place, args.again)
    print(_row(["class", "tries", *OUTCOMES, "seconds"]), flush=True)
    counts = shares(max(1, args.tries), [load(name) for name in CLASSES])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        words = (["--tries", str(n), "--seed", str(args.seed), "--out", place] for n in counts)
        return max(pool.map(_in_a_process, CLASSES, words, [place] * len(CLASSES)))


def _in_a_process(name: str, words: Sequence[object], place: Path) -> int:
    """Run a class in a process of its own, as the code under test may kill the process."""
    command = [sys.executable, "-m", "proof.fuzz.run", "--only", name, *map(str, words)]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    said = done.stdout + done.stderr
    # A signal ended the process, which no `except` there can catch. Example: counts of 2**62, whose
    # sum wraps around to 0, once made numpy write out of bounds.
    if done.returncode < 0:
        by, folder = signal.Signals(-done.returncode).name, place / name / "try"
        said += f"{name}: crash: the process ended by {by}: {noted(folder)}; input: {folder}\n"
    print(said, end="", flush=True)
    return int(done.returncode != 0)


def run_one(kind: Kind, tries: int, seed: int, out: Path, again: str = "") -> int:
    """Run the tries of one class; print the class's row, and its fault if there is one."""
    start = time.monotonic()
    counts, fault = search(kind, tries, seed, out / kind.name, again)
    cells = [kind.name, counts.total(), *(counts[outcome] for outcome in OUTCOMES)]
    print(_row([*cells, round(time.monotonic() - start)]))
    if fault:
        _say(kind, fault, out / kind.name)
    elif again:
        print("  the try of --again has no fault any more")
    return int(fault is not None)


def _row(cells: Sequence[object]) -> str:
    name, *counts = map(str, cells)
    return f"{name:<10}" + "".join(f"{count:>15}" for count in counts)


def _say(kind: Kind, fault: Fault, place: Path) -> None:
    blob = blob_of(fault)
    folder = place / ("try" if blob or not (place / "first").exists() else "first")
    detail = fault.detail.strip().replace("\n", "\n      ")
    print(f"  {fault.outcome}: {noted(folder)}\n      {detail[:2000]}")
    for step in steps_of(fault):
        print(f"      {step}")
    again = f"again: python -m proof.fuzz.run --only {kind.name} --again {blob}"
    print(f"      {again if blob else 'the fault did not come again'}\n      input: {folder}")


if __name__ == "__main__":
    sys.exit(main())
