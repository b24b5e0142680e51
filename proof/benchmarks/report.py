"""Write the tables of proof/benchmarks/README.md from the records in proof/benchmarks/results.

    python -m proof.benchmarks.report

A test checks that the page has exactly the tables that this module makes of the records.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCHES = ("dispatch", "store", "publish", "scale", "balance", "gate")


def main() -> int:
    """Write the page; return the exit status."""
    try:
        page, text = with_tables(ROOT)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if page.read_text() != text:
        page.write_text(text)
        print(f"written: {page}")
    return 0


def with_tables(root: Path) -> tuple[Path, str]:
    """The page, and the text that it should have.

    Args:
        root: a checkout, with the page and proof/benchmarks/results.

    Raises:
        ValueError: a results file is no record of a run, or the page lacks a table's two markers.
    """
    page = root / "proof" / "benchmarks" / "README.md"
    text = page.read_text()
    for name in BENCHES:
        bench = importlib.import_module(f"proof.benchmarks.{name}").BENCH
        recorded = sorted((root / "proof" / "benchmarks" / "results").glob(f"{name}-cpu-*.json"))
        part = bench.part(recorded[-1]) if recorded else "No run is recorded."
        text = filled(text, name, part, page)
    return page, text


def filled(
    text: str, name: str, part: str, path: Path, maker: str = "proof.benchmarks.report"
) -> str:
    """The document with the lines between two markers replaced by `part`.

    Args:
        text: the document, with `<!-- NAME: made by python -m MAKER -->` and `<!-- NAME: end -->`
            on lines of their own.
        name: NAME in the markers.
        part: the new text between the markers.
        path: the document's path, for the error.
        maker: MAKER, the module that makes the part.

    Raises:
        ValueError: the document does not have each marker once, in this order.
    """
    begin = f"<!-- {name}: made by python -m {maker} -->\n"
    end = f"<!-- {name}: end -->\n"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{path}: expected once the line {begin!r}, and {end!r} after it")
    before, after = text.partition(begin)[0], text.partition(end)[2]
    return f"{before}{begin}\n{part}\n\n{end}{after}"


if __name__ == "__main__":
    sys.exit(main())
