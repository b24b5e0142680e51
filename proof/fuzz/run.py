"""Bad input, thousands of times.

    python -m proof.fuzz.run --tries N --seed S [--only CLASS [--try K]]

The table says how many tries of each class had which outcome (docs/fuzz.md). The exit status is 1
if any input was accepted wrongly or refused wrongly, if the code crashed or hung, or if an error
was not one clear line.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from proof.fuzz.outcome import FAULTS, OUTCOMES, Kind
from proof.fuzz.pool import Result, run_tries

CLASSES = ("shards", "responses", "prompts", "configs", "trees", "signals")
_SHOWN = 12  # this many faults of a class are printed whole; the others are counted


def load(name: str) -> Kind:
    """The class of tries with this name, which is `KIND` of the module with this name."""
    kind: Kind = import_module(f"proof.fuzz.{name}").KIND
    return kind


def shares(tries: int, kinds: Sequence[Kind]) -> list[int]:
    """How many of all tries each class gets; it is at least one, and the largest gets the rest."""
    total = sum(kind.share for kind in kinds)
    counts = [max(1, tries * kind.share // total) for kind in kinds]
    largest = max(range(len(kinds)), key=lambda i: counts[i])
    counts[largest] = max(1, counts[largest] + tries - sum(counts))
    return counts


def main(argv: Sequence[str] | None = None, kinds: Sequence[Kind] | None = None) -> int:
    """Run the tries and print the table; return 1 if there is a fault."""
    parser = argparse.ArgumentParser(prog="python -m proof.fuzz.run", description=__doc__)
    add = parser.add_argument
    add("--tries", type=int, default=10_000, help="of all classes together (default: 10000)")
    add("--seed", type=int, default=0, help="the same seed makes the same tries (default: 0)")
    add("--only", metavar="CLASS", help=f"one of {', '.join(CLASSES)}")
    add("--try", type=int, dest="number", metavar="K", help="of --only: this try alone")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    text = "where the input of each fault is kept (default: build/fuzz)"
    add("--out", type=Path, default=Path("build/fuzz"), metavar="DIR", help=text)
    add("--verbose", action="store_true", help="count by what was done to the input, too")
    args = parser.parse_args(argv)
    if kinds is None:
        if args.only and args.only not in CLASSES:
            parser.error(f"--only {args.only}: one of {', '.join(CLASSES)}")
        kinds = [load(name) for name in ([args.only] if args.only else CLASSES)]
    if args.number is not None and len(kinds) != 1:
        parser.error("--try K is a try of one class: give --only CLASS")
    faults = 0
    print(_row(["class", "tries", *OUTCOMES, "seconds"]))
    for kind, count in zip(kinds, shares(max(1, args.tries), kinds), strict=True):
        numbers = range(count) if args.number is None else [args.number]
        start = time.monotonic()
        results = [*run_tries(kind, numbers, args.seed, args.jobs, args.out)]
        counts = Counter(result.verdict.outcome for result in results)
        cells = [kind.name, len(results), *(counts[outcome] for outcome in OUTCOMES)]
        print(_row([*cells, round(time.monotonic() - start)]), flush=True)
        _say_faults(kind, results, args.seed, args.out)
        if args.number is not None:
            print("\n".join(f"  {result.what}: {result.verdict}" for result in results))
        elif args.verbose:
            _say_by_what(results)
        faults += sum(counts[outcome] for outcome in FAULTS)
    if faults:
        print(f"{faults} faults; what was given in each is in {args.out}/", file=sys.stderr)
    return int(faults > 0)


def _row(cells: Sequence[object]) -> str:
    name, *counts = map(str, cells)
    return f"{name:<10}" + "".join(f"{count:>15}" for count in counts)


def _say_faults(kind: Kind, results: Sequence[Result], seed: int, out: Path) -> None:
    faults = sorted((r for r in results if r.verdict.outcome in FAULTS), key=lambda r: r.number)
    for fault in faults[:_SHOWN]:
        detail = fault.verdict.detail.strip().replace("\n", "\n      ")
        print(f"  {fault.verdict.outcome}: {fault.what}\n      {detail[:800]}")
        again = f"python -m proof.fuzz.run --only {kind.name} --seed {seed} --try {fault.number}"
        print(f"      again: {again}; input: {out / f'{kind.name}-{seed}-{fault.number}'}")
    if len(faults) > _SHOWN:
        by_what = Counter((f.verdict.outcome, f.what.partition(":")[0]) for f in faults)
        listed = ", ".join(f"{n} {outcome} ({what})" for (outcome, what), n in by_what.items())
        print(f"  {len(faults)} faults: {listed}")


def _say_by_what(results: Sequence[Result]) -> None:
    by_what: dict[str, Counter[str]] = {}
    said: dict[str, str] = {}
    for result in results:
        what = result.what.partition(":")[0]
        by_what.setdefault(what, Counter())[result.verdict.outcome] += 1
        said[what] = " ".join(result.verdict.detail.split()) or said.get(what, "")
    for what, counts in sorted(by_what.items()):
        told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
        example = f"; such as: {said[what][:200]}" if said[what] else ""
        print(f"    {what}: {told}{example}")


if __name__ == "__main__":
    sys.exit(main())
