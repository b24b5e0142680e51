"""The tables of a comparison, and what it says of R3 beside live, in one line for each regime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from textwrap import fill
from typing import Any

from proof.comparison.arms import ARMS, CONTROL, NOISE, REGIMES, STALE, Regime
from proof.comparison.measure import half, of_arm, window_ends, windows

# what stands in a column: its heading, the value, and how its numbers are written; all are means of
# the second half of a run
_COLUMNS = [
    ("reward", "reward", ".3f"),
    ("k3", "k3", ".2g"),
    ("F(2)", "f2", ".2g"),
    ("routers that differ", "router_mismatch", ".1%"),
    ("tokens that differ", "token_mismatch", ".1%"),
    ("entropy", "entropy", ".3f"),
]
BY_WINDOW = ("reward", "k3")  # what is also shown window by window


def rows_of(record: dict[str, Any], regime: Regime) -> list[list[str]]:
    """A row of cells for each arm of a regime that has runs: the mean of its seeds, and the range.

    Args:
        record: what `proof.comparison.run` wrote.
    """
    rows = []
    for key in regime.arms:
        runs = of_arm(record, regime.key, key)
        if runs:
            cells = [_cell([half(run[name]) for run in runs], form) for _, name, form in _COLUMNS]
            rows.append([ARMS[key].name, *cells, str(len(runs))])
    return rows


def window_rows(record: dict[str, Any], regime: Regime, name: str) -> list[list[str]]:
    """A row for each arm of a regime that has runs: in each window the mean of its seeds."""
    rows = []
    for key in regime.arms:
        if runs := of_arm(record, regime.key, key):
            means = zip(*(windows(run[name]) for run in runs), strict=True)
            form = ".2f" if name == "reward" else ".2g"
            rows.append([ARMS[key].name, *(format(fmean(mean), form) for mean in means)])
    return rows


def window_columns(record: dict[str, Any], name: str) -> list[str]:
    """The headings of `window_rows`: `reward in collections 1-10`, `11-20`, ..."""
    ends = window_ends(record["collections"])
    spans = [f"{first}-{last}" for first, last in ends]
    return ["", f"{name} in {spans[0]}", *spans[1:]]


def _cell(values: Sequence[float], form: str) -> str:
    """Example: 0.612 (0.590 to 0.663)."""
    mean = format(fmean(values), form)
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):{form}} to {max(values):{form}})"


def columns() -> list[str]:
    """The headings of `rows_of`."""
    return ["", *(heading for heading, _, _ in _COLUMNS), "seeds"]


# -- R3 beside live


def pairs(record: dict[str, Any], regime: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The runs of live and of R3 that have the same seed."""
    live, r3 = ({run["seed"]: run for run in of_arm(record, regime, key)} for key in ("live", "r3"))
    for seed in sorted(live.keys() & r3.keys()):
        yield live[seed], r3[seed]


def verdict(record: dict[str, Any], regime: Regime) -> str:
    """What the second halves of the runs say of live and R3, seed by seed; empty without a pair."""
    both = list(pairs(record, regime.key))
    if not both:
        return ""
    rewards = [(half(live["reward"]), half(r3["reward"])) for live, r3 in both]
    above = sum(r3 > live for live, r3 in rewards)
    apart = ", ".join(f"{r3 - live:+.3f}" for live, r3 in rewards)
    ratios = ", ".join(
        f"{a / b:.1f}" if b else "all" for a, b in ((half(x["k3"]), half(y["k3"])) for x, y in both)
    )
    seeds = "seed" if len(both) == 1 else "seeds"
    return (
        f"{regime.name}: the reward of R3 is above that of live in {above} of {len(both)} {seeds} "
        f"({apart}); k3 of live / k3 of R3: {ratios}"
    )


def holds(record: dict[str, Any]) -> bool | None:
    """Whether under router noise R3 is above live in each seed, and its k3 at least 3 times lower.

    None where the record has no pair of runs under noise.
    """
    both = list(pairs(record, "noise"))
    if not both:
        return None
    return all(
        half(r3["reward"]) > half(live["reward"]) and half(live["k3"]) >= 3 * half(r3["k3"])
        for live, r3 in both
    )


def claim(record: dict[str, Any]) -> str:
    """What `holds` says, as a sentence."""
    found = holds(record)
    if found is None:
        return f"No pair of live and R3 was run under noise {NOISE}."
    text = "at least 3 times lower k3 and a higher reward in each seed"
    return f"Under noise {NOISE} R3 has {'' if found else 'NOT '}{text}."


def tables_of(record: dict[str, Any], regime: Regime) -> list[tuple[list[str], list[list[str]]]]:
    """Headings and rows of the tables of a regime; none if it has no run."""
    if not (rows := rows_of(record, regime)):
        return []
    by_window = [
        (window_columns(record, name), window_rows(record, regime, name)) for name in BY_WINDOW
    ]
    return [(columns(), rows), *by_window]


def summary(record: dict[str, Any]) -> str:
    """The tables and the verdicts, for a terminal."""
    parts = []
    for regime in REGIMES.values():
        for head, rows in tables_of(record, regime):
            table = [[head[0] or regime.name, *head[1:]], *rows]
            widths = [max(len(row[i]) for row in table) for i in range(len(head))]
            padded = [zip(row, widths, strict=True) for row in table]
            parts.append("\n".join("  ".join(c.ljust(w) for c, w in row) for row in padded))
    said = [line for regime in REGIMES.values() if (line := verdict(record, regime))]
    return "\n\n".join([*parts, "\n".join([*said, claim(record)])])


# -- the document


def markdown(record: dict[str, Any]) -> str:
    """The tables of docs/comparison.md, with what was recorded where, and the verdicts."""
    runs, collections = record["runs"], record["collections"]
    seconds = sum(run["seconds"] for run in runs)
    where = (
        f"Recorded on {record['date']} in "
        "[comparison.json](../proof/benchmarks/results/comparison.json): "
        f"{record['processor']} ({record['machine']}), {record['cores']} cores, load "
        f"{record['load']} at the start, Python {record['python']}, torch {record['torch']}; "
        f"{len(runs)} runs of {collections} collections, which took {seconds / 60:.0f} minutes if "
        "one adds them up. Values are means over the second half of a run. A cell has the mean of "
        "the seeds, and in brackets the smallest and the largest seed."
    )
    parts = [_wrapped(where), f"**{claim(record)}**"]
    for regime in REGIMES.values():
        if tables := tables_of(record, regime):
            parts += [f"### {_TITLES[regime.key]}", *(_table(*one) for one in tables)]
            if said := verdict(record, regime):
                parts.append(_wrapped(f"{said}."))
    return "\n\n".join(parts)


_TITLES = {
    CONTROL: "No mismatch",
    "bf16": "A sampler in bfloat16",
    "fp8": "A sampler with weights and activations as in float8",
    "noise": f"A sampler whose routers have noise of {NOISE}",
    STALE: f"Rollouts that are {REGIMES[STALE].lag} versions old",
}


def _wrapped(text: str) -> str:
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
