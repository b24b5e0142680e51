"""Records a comparison: the file of results, the picture and the tables of docs/comparison.md.

    python -m proof.comparison.report [--record build/comparison/comparison.json]

Without --record the document is made anew from what is recorded. A test holds that it is what this
makes of the recorded results, so that it does not say more.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from proof.benchmarks.report import filled
from proof.comparison.arms import ARMS, REGIMES
from proof.comparison.measure import VALUES
from proof.comparison.picture import picture
from proof.comparison.policy import ROOT
from proof.comparison.run import as_json
from proof.comparison.table import markdown

NOTHING = "No run is recorded."
_FACTS = ("date", "processor", "machine", "cores", "load", "python", "torch", "collections", "runs")


def main(argv: list[str] | None = None) -> int:
    """Write results, picture and document; 1 where a record cannot be taken."""
    description = str(__doc__).splitlines()[0]
    parser = argparse.ArgumentParser(
        prog="python -m proof.comparison.report", description=description
    )
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="what proof.comparison.run wrote"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="of the checkout (default: this)")
    args = parser.parse_args(argv)
    results, page = results_of(args.root), args.root / "docs" / "comparison.md"
    try:
        if args.record is not None:
            record = read_record(args.record)
            picture(record, args.root / "docs" / "comparison.png")
            results.write_text(as_json(record))
        page.write_text(document(args.root))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"written: {page}")
    return 0


def results_of(root: Path) -> Path:
    """Where a checkout has the recorded comparison."""
    return root / "proof" / "benchmarks" / "results" / "comparison.json"


def document(root: Path) -> str:
    """The text that docs/comparison.md of a checkout should have.

    Raises:
        ValueError: the recorded results cannot be taken, or the page has no place for them.
    """
    page, results = root / "docs" / "comparison.md", results_of(root)
    part = NOTHING
    if results.exists():
        shown = "![reward and k3 by collection, for each regime](comparison.png)"
        part = f"{markdown(read_record(results))}\n\n{shown}"
    return filled(page.read_text(), "comparison", part, page, "proof.comparison.report")


def read_record(file: Path) -> dict[str, Any]:
    """Read what `proof.comparison.run` wrote.

    Raises:
        ValueError: a fact or a run is missing, or a run is not whole; the message names the file.
    """
    try:
        record: dict[str, Any] = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not JSON ({error})") from error
    if missing := [name for name in _FACTS if name not in record]:
        raise ValueError(f"{file}: no {missing[0]}: give the file that proof.comparison.run wrote")
    if not record["runs"]:
        raise ValueError(f"{file}: no run is complete: make compare, then record")
    seen = set()
    for run in record["runs"]:
        key = (run["regime"], run["arm"], run["seed"])
        name = f"{file}: {run['regime']}/{run['arm']}-{run['seed']}"
        if run["regime"] not in REGIMES or run["arm"] not in REGIMES[run["regime"]].arms:
            raise ValueError(f"{name}: there is no such run; the arms are {', '.join(ARMS)}")
        if key in seen:
            raise ValueError(f"{name} is there twice")
        seen.add(key)
        for value in VALUES:
            numbers = run[value]
            if len(numbers) != record["collections"] or not all(map(math.isfinite, numbers)):
                raise ValueError(
                    f"{name}: {value} must be {record['collections']} finite numbers, one for "
                    f"each collection; there are {len(numbers)}"
                )
    return record


if __name__ == "__main__":
    sys.exit(main())
