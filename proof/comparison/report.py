"""Writes the tables and the picture of docs/comparison.md from the record of a comparison.

    python -m proof.comparison.report [--record build/comparison/comparison.json]

With --record, the record also becomes the recorded results. Without --record, the page alone is
written, from the results that are recorded already. A test checks that the page has exactly what
this module makes of the results.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

import numpy as np

from megatron_r3.loop.report import read_run
from proof.benchmarks.bench import table
from proof.benchmarks.report import filled
from proof.comparison.arms import ARMS, REGIMES
from proof.comparison.start import ROOT

RESULTS = "proof/benchmarks/results/comparison.json"
# the names here, and those in metrics.jsonl (docs/metrics.md)
METRICS = {"k3": "update/sampler k3 kl", "router_mismatch": "router mismatch"}
SHOWN = {
    "reward": ("reward", ".2f"),
    "k3": ("k3", ".2g"),
    "routers differ": ("router_mismatch", ".1%"),
}
_DRAWN = {"none": "#777777", "live": "#d1495b", "r3": "#1f6f8b"}  # arms, and their colours
SMOOTH = 5  # a point of the picture is the mean of a collection and the 4 before it
Record = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Write results, picture and page; return the exit status, 1 if a record cannot be read."""
    description = str(__doc__).splitlines()[0]
    parser = argparse.ArgumentParser(
        prog="python -m proof.comparison.report", description=description
    )
    parser.add_argument("--record", type=Path, help="the JSON file of proof.comparison.run")
    args = parser.parse_args(argv)
    page = ROOT / "docs" / "comparison.md"
    try:
        if args.record is not None:
            record = read_record(args.record)
            picture(record, ROOT / "docs" / "comparison.png")
            (ROOT / RESULTS).write_text(as_json(record))
        page.write_text(document(ROOT))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"written: {page}")
    return 0


# -- values and records


def measured(directory: Path, collections: int, steps: int) -> dict[str, list[float]]:
    """The values of a run: for each name a list with one value for each collection.

    The trainer's values are those of the first update on each collection, measured before the
    weights change. So the values show the mismatch (and staleness, if there is some), and no effect
    of the update.

    Args:
        directory: the directory of a run, as `megatron-r3 rl run` leaves it.
        collections: how many collections the run must have.
        steps: how many optimizer steps the run takes on a collection.

    Returns:
        `reward`: the mean reward of the sampler's answers. `k3`: the k3 KL from the sampler's
        policy to the trainer's. `router_mismatch`: the share of (token, layer) pairs for which the
        trainer's router would take other experts.

    Raises:
        ValueError: a collection lacks one of these values, or the value is not finite.
    """
    run = read_run(directory, directory.name)

    def each(curve: dict[int, float], keys: range, what: str) -> list[float]:
        for key in keys:
            if not math.isfinite(curve.get(key, math.nan)):
                raise ValueError(f"{directory}: {what} {key} is missing or not finite")
        return [float(f"{curve[key]:.5g}") for key in keys]

    rewards = {event["collection"]: float(event["reward"]) for event in run.of("collected")}
    first = range(1, collections * steps + 1, steps)  # steps are counted from 1
    return {"reward": each(rewards, range(collections), "reward of collection")} | {
        name: each(run.metrics.get(metric, {}), first, f"{metric} in step")
        for name, metric in METRICS.items()
    }


def read_record(file: Path) -> Record:
    """Read what `proof.comparison.run` wrote.

    Raises:
        ValueError: a field or all runs are missing.
    """
    try:
        record: Record = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not JSON ({error})") from error
    if missing := {"date", "load", "torch", "collections", "runs"} - record.keys():
        raise ValueError(f"{file}: no {min(missing)}: give a file that proof.comparison.run wrote")
    if not record["runs"]:
        raise ValueError(f"{file}: no run is complete yet: run make compare until one is")
    return record


def as_json(record: Record) -> str:
    """The text of a record, in which each of `runs` is a line of its own."""
    head = json.dumps({name: value for name, value in record.items() if name != "runs"}, indent=1)
    lines = ",\n".join(f"  {json.dumps(run)}" for run in record["runs"])
    return f'{head[:-2]},\n "runs": [\n{lines}\n ]\n}}\n'


def of_arm(record: Record, regime: str, arm: str) -> list[dict[str, Any]]:
    """The runs of an arm in a record, in the order of their seeds; empty if the arm has none."""
    runs = [run for run in record["runs"] if (run["regime"], run["arm"]) == (regime, arm)]
    return sorted(runs, key=lambda run: int(run["seed"]))


def half(values: Sequence[float]) -> float:
    """The mean of the second half, by which arms are compared: of 60 collections the last 30."""
    return fmean(values[len(values) // 2 :])


# -- tables


def pairs(record: Record, regime: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the run of live and the run of R3 for each seed that has both."""
    live, r3 = ({run["seed"]: run for run in of_arm(record, regime, key)} for key in ("live", "r3"))
    for seed in sorted(live.keys() & r3.keys()):
        yield live[seed], r3[seed]


def verdicts(record: Record) -> str:
    """The table that compares R3 with live, by seed; empty if no seed has a run of each."""
    rows = []
    for key, regime in REGIMES.items():
        if both := list(pairs(record, key)):
            apart = [half(r3["reward"]) - half(live["reward"]) for live, r3 in both]
            k3 = [(half(live["k3"]), half(r3["k3"])) for live, r3 in both]
            more = ", ".join(f"{value:+.2f}" for value in apart)
            ratios = ", ".join(f"{a / b:.1f}" if b else "all" for a, b in k3)
            above = f"{sum(value > 0 for value in apart)} of {len(both)}"
            rows.append([regime.name, above, more, ratios])
    head = ["R3 beside live", "seeds with more reward", "reward, R3 - live", "k3, live / R3"]
    return table(head, rows) if rows else ""


def tables(record: Record) -> str:
    """The table with a row for each arm that has runs, and the table of `verdicts`."""
    rows = []
    for key, regime in REGIMES.items():
        for arm in regime.arms:
            if runs := of_arm(record, key, arm):
                cells = [_cell([half(run[name]) for run in runs], f) for name, f in SHOWN.values()]
                rows.append([regime.name, ARMS[arm].name, *cells])
    return f"{table(['sampler', 'arm', *SHOWN], rows)}\n\n{verdicts(record)}".strip()


def _cell(values: Sequence[float], form: str) -> str:
    """The mean, and in brackets the smallest and the largest: "0.61 (0.59..0.66)".

    The brackets are left out for percentages, and if smallest and largest are printed alike.
    """
    low, high, mean = (format(find(values), form) for find in (min, max, fmean))
    return mean if low == high or form.endswith("%") else f"{mean} ({low}..{high})"


def document(root: Path) -> str:
    """The text that docs/comparison.md of a checkout should have.

    Raises:
        ValueError: the recorded results are wrong, or the page lacks the markers for them.
    """
    page, results = root / "docs" / "comparison.md", root / RESULTS
    part = "No run is recorded."
    if results.exists():
        record = read_record(results)
        minutes = sum(run["seconds"] for run in record["runs"]) / 60
        where = (
            f"Recorded on {record['date']} in [comparison.json](../{RESULTS}): "
            f"{record['processor']} ({record['machine']}), {record['cores']} cores, load "
            f"{record['load']} at the start, Python {record['python']}, torch {record['torch']}; "
            f"{len(record['runs'])} runs of {record['collections']} collections, {minutes:.0f} "
            "minutes in all. A cell has the mean of the seeds, and in brackets the smallest and "
            "the largest, over the second half of a run."
        )
        wrapped = fill(where, 120, break_long_words=False, break_on_hyphens=False)
        shown = "![reward and k3 by collection, in the regimes with a mismatch](comparison.png)"
        part = f"{wrapped}\n\n{tables(record)}\n\n{shown}"
    return filled(page.read_text(), "comparison", part, page, "proof.comparison.report")


# -- the picture


def picture(record: Record, path: Path) -> None:
    """Write the picture of a record as PNG: a column for each regime with a run of live.

    The upper row has the reward, the lower row k3: the mean of the seeds, with a band from the
    smallest to the largest. Each column also has the reward of the runs without a mismatch.

    Raises:
        ValueError: the record has no run of live.
    """
    # pyplot is not used: it keeps every figure, and may need a screen.
    from matplotlib.figure import Figure

    drawn = [key for key in REGIMES if of_arm(record, key, "live")]
    if not drawn:
        raise ValueError("the record has no run of the arm live, so there is nothing to draw")
    figure = Figure(figsize=(3.6 * len(drawn) + 0.6, 6), layout="constrained")
    axes = figure.subplots(2, len(drawn), sharex=True, sharey="row", squeeze=False)
    for column, key in enumerate(drawn):
        for name, on in zip(("reward", "k3"), axes[:, column], strict=True):
            for arm, curves in curves_of(record, key, name).items():
                x = range(1, curves.shape[1] + 1)
                low, high, mean = (find(curves, axis=0) for find in (np.min, np.max, np.mean))
                on.fill_between(x, low, high, color=_DRAWN[arm], alpha=0.15, linewidth=0)
                on.plot(x, mean, color=_DRAWN[arm], linewidth=1.6, label=ARMS[arm].name)
            on.grid(axis="y", linewidth=0.4, alpha=0.5)
        axes[0][column].set(title=REGIMES[key].name, ylim=(0, 1))
        axes[1][column].set(yscale="log", xlabel="collection")
    axes[0][0].set_ylabel("reward of the sampler's answers")
    axes[1][0].set_ylabel("k3, sampler to trainer")
    axes[0][0].legend(loc="lower left", frameon=False, fontsize=9)
    # no date and no version in the file: the same record gives the same picture
    figure.savefig(path, dpi=110, metadata={"Software": None})


def curves_of(record: Record, regime: str, name: str) -> dict[str, np.ndarray]:
    """The smoothed curves of a panel, a row for each seed, by arm; arms without a run have none.

    In the regime "stale" the curve of "none" is that of the regime's own arm "none". In every other
    regime it is the reward of the regime "control"; the k3 of "control" is not drawn, because this
    k3 is rounding alone and thousands of times smaller.
    """
    found = {}
    for arm in _DRAWN:
        own = arm in REGIMES[regime].arms
        if (own or name == "reward") and (
            runs := of_arm(record, regime if own else "control", arm)
        ):
            found[arm] = np.array([smooth(run[name]) for run in runs])
    return found


def smooth(values: Sequence[float]) -> list[float]:
    """For each value the mean of this value and of the up to `SMOOTH` - 1 values before it."""
    return [fmean(values[max(0, i + 1 - SMOOTH) : i + 1]) for i in range(len(values))]


if __name__ == "__main__":
    sys.exit(main())
