"""What the benchmarks on the CPU share: options, a table, a record, and the exit status.

A way is one of the variants that a benchmark compares, for example training without replay.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proof.benchmarks.interval import median_of, shown
from proof.benchmarks.machine import machine_at_start, write_results

Row = dict[str, Any]
Seconds = Mapping[str, Sequence[float]]  # for the name of each way, its seconds in each round
AGAIN = " again"  # "live again" is the second step of the first way, "live", in a round


@dataclass(frozen=True)
class Bench:
    """A benchmark: what it measures, and its table.

    Attributes:
        name: the name of its record.
        doc: the docstring of its module; `--help` prints the first line.
        columns: the headings of the table, and for each a function from a row to its cell.
        measure: takes the options, whose `cases` are those that `--only` chose, and yields each
            row once it is measured. A ValueError is printed as one line.
        wrong: returns what is wrong with a row, in words, or "". A wrong row gives exit status 1.
        cases: what `--only` chooses from, by name; None if there is no such option.
        rounds: the help of `--rounds`; empty if there is no such option.
        default_rounds: the default of `--rounds`.
        options: more options, whole numbers above 0, by name: the default, and the help.
        about: the end of the sentence about a record in README.md; `{NAME}` is a value of the
            record.
        facts: more values for the record, from the options.
    """

    name: str
    doc: str | None
    columns: Mapping[str, Callable[[Row], str]]
    measure: Callable[[argparse.Namespace], Iterable[Row]]
    wrong: Callable[[Row], str] = lambda row: ""
    cases: Mapping[str, Any] | None = None
    rounds: str = ""
    default_rounds: int = 32
    options: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    about: str = "CPU tensors and gloo"
    facts: Callable[[argparse.Namespace], Row] = lambda args: {}

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Measure, print each row as it comes, write all rows; return the exit status."""
        args = self.parse(argv)
        record = {**machine_at_start(), "device": "cpu, gloo", **self.facts(args)}
        record["most_rounds"] = getattr(args, "rounds", 1)
        rows: list[Row] = []
        print(f"load at the start: {record['load']}\n{table(self.columns, [])}", flush=True)
        try:
            for row in self.measure(args):
                rows.append(row)
                print(line(self.cells(row)), flush=True)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        write_results(args.out, self.name, {**record, "rows": rows})
        wrong = [(row, reason) for row in rows if (reason := self.wrong(row))]
        for row, reason in wrong:
            named = " ".join(cell for cell in self.cells(row)[:3])
            print(f"error: {named}: {reason}", file=sys.stderr)
        return 1 if wrong else 0

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """The options.

        Raises:
            SystemExit: status 2: an option is wrong, or no case has the text of `--only` in its
                name.
        """
        parser = argparse.ArgumentParser(prog=self.name, description=str(self.doc).splitlines()[0])
        add = parser.add_argument
        add("--out", type=Path, required=True, help="the JSON file to write")
        options = dict(self.options)
        if self.rounds:
            options["rounds"] = (self.default_rounds, self.rounds)
        for name, (default, what) in options.items():
            add(f"--{name}", type=int, default=default, help=f"{what} (%(default)r)")
        if self.cases is not None:
            names = "; ".join(self.cases)
            add("--only", default="", help=f"only cases with this text in their names: {names}")
        args = parser.parse_args(argv)
        for name in options:
            if (number := getattr(args, name)) < 1:
                parser.error(f"--{name} {number}: must be at least 1")
        if self.cases is not None:
            args.cases = {name: case for name, case in self.cases.items() if args.only in name}
            if not args.cases:
                parser.error(f"--only {args.only}: no case has this in its name: {names}")
        return args

    def cells(self, row: Row) -> list[str]:
        """The cells of a row."""
        return [cell(row) for cell in self.columns.values()]

    def part(self, path: Path) -> str:
        """What README.md has about a recorded run: a sentence on its machine, and the table.

        Raises:
            ValueError: the file is no JSON object.
        """
        try:
            found = dict(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: not a results file: {error}") from error
        return (
            f"Recorded in `results/{path.name}`: {found['processor']} ({found['machine']}), "
            f"{found['cores']} cores,\nload {found['load']} at the start, Python "
            f"{found['python']}, {self.about.format_map(found)}\n\n"
            f"{table(self.columns, map(self.cells, found['rows']))}"
        )


def table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    head = [*head]
    return "\n".join(map(line, [head, ["---"] * len(head), *rows]))


def line(cells: Iterable[str]) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def number(name: str, form: str = ".0f", times: float = 1.0) -> Callable[[Row], str]:
    """A function from a row to a cell: `times` the number `name`; empty if the row has none."""
    return lambda row: "" if row.get(name) is None else format(times * row[name], form)


def text(name: str) -> Callable[[Row], str]:
    """A function from a row to a cell: the value `name` as text; empty if the row has none."""
    return lambda row: str(row.get(name, ""))


def ratio(name: str) -> Callable[[Row], str]:
    """A function from a row to a cell: `interval.shown` of the ratio `name`, empty without one."""
    return lambda row: shown(row[name]) if row.get(name) else ""


def recomputed(row: Row) -> str:
    """The cell that says how much is recomputed: "full" or "none"."""
    return "full" if row["recompute"] else "none"


def ratios(seconds: Seconds, way: str, other: str) -> list[float]:
    """In each round, the seconds of one way divided by those of another way."""
    return [mine / its for mine, its in zip(seconds[way], seconds[other], strict=True)]


def ratios_to_first(seconds: Seconds, way: str) -> list[float]:
    """In each round, a way's seconds divided by the geometric mean of the first way's two steps.

    Args:
        seconds: the first way, the first way again, and others. The first way again is compared
            with the first way alone.
    """
    first, again = [*seconds][:2]
    if way == again:
        return ratios(seconds, again, first)
    both = zip(seconds[way], seconds[first], seconds[again], strict=True)
    return [mine / math.sqrt(one * two) for mine, one, two in both]


def compared_to_first(seconds: Seconds, way: str) -> dict[str, Any] | None:
    """The record of the `Median` of `ratios_to_first`; None for the first way."""
    first = next(iter(seconds))
    return None if way == first else median_of(ratios_to_first(seconds, way)).record()


def compared(seconds: Seconds, way: str, other: str | None) -> dict[str, Any] | None:
    """The record of the `Median` of `ratios`; None if `other` is None or the way itself."""
    return None if other in (None, way) else median_of(ratios(seconds, way, str(other))).record()


def median_ms(seconds: Sequence[float]) -> float:
    """The median, in milliseconds."""
    return 1e3 * statistics.median(seconds)


def each(rows: Iterable[Row], **alike: Any) -> Iterator[Row]:
    """Each row, after the values `alike`, which are the same for all rows."""
    return ({**alike, **row} for row in rows)
