"""What a run has shown: a value of each collection, from the events and metrics in its directory.

The trainer's values are those of the first update on each collection. Before it the trainer's
policy is the one from which the update starts, so what differs from the sampler is the mismatch
(and staleness, if there is some), and nothing of the update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_r3.loop.report import Curve, read_run

WINDOWS = 6
# the names here, and those in metrics.jsonl (docs/metrics.md)
METRICS = {
    "k3": "update/sampler k3 kl",
    "f2": "update/sampler extreme",
    "router_mismatch": "router mismatch",
    "token_mismatch": "token mismatch",
    "entropy": "update/entropy",
}
VALUES = ("reward", *METRICS)


def measured(directory: Path, collections: int, steps: int) -> dict[str, list[float]]:
    """The values of a run, by name one for each collection.

    Args:
        directory: of a run, as `megatron-r3 rl run` leaves it.
        collections: how many it must have.
        steps: optimizer steps on a collection.

    Returns:
        `reward`: the mean reward of the sampler's answers. `k3`: k3 of the trainer's policy and the
        sampler's. `f2`: the share of tokens whose ratio of probabilities is not between 1/2 and 2.
        `router_mismatch`: the share of (token, layer) pairs for which the trainer's router would
        take other experts; `token_mismatch`: of tokens with such a layer. `entropy`: of the
        trainer's policy, in nats a token.

    Raises:
        ValueError: a collection has no such value, or one that is not finite.
    """
    run = read_run(directory, directory.name)
    rewards = {event["collection"]: float(event["reward"]) for event in run.of("collected")}
    found = {"reward": _each(rewards, range(collections), f"{directory}: reward of collection")}
    first = range(1, collections * steps + 1, steps)
    for name, metric in METRICS.items():
        curve: Curve = run.metrics.get(metric, {})  # by step, counted from 1
        found[name] = _each(curve, first, f"{directory}: {metric} in step")
    return found


def _each(curve: Curve, keys: range, what: str) -> list[float]:
    for key in keys:
        if not math.isfinite(curve.get(key, math.nan)):
            raise ValueError(f"{what} {key} is missing or not finite: the run is not whole")
    return [float(f"{curve[key]:.5g}") for key in keys]


def window_ends(count: int) -> list[tuple[int, int]]:
    """The first and the last collection of each window, counted from 1.

    Example: 60 collections are in six windows, 1 to 10, 11 to 20, and so on. Where the number does
    not divide evenly, windows differ by one; there are never more windows than collections.
    """
    most = min(WINDOWS, count)
    edges = [round(i * count / most) for i in range(most + 1)]
    return [(a + 1, b) for a, b in pairwise(edges)]


def windows(values: Sequence[float]) -> list[float]:
    """The means of the values in each window."""
    return [fmean(values[first - 1 : last]) for first, last in window_ends(len(values))]


def half(values: Sequence[float]) -> float:
    """The mean of the second half, with which arms are compared: of 60 collections the last 30."""
    return fmean(values[len(values) // 2 :])


def of_arm(record: dict[str, Any], regime: str, arm: str) -> list[dict[str, Any]]:
    """The runs of an arm in a record, by seed; empty if it has none."""
    runs = [run for run in record["runs"] if (run["regime"], run["arm"]) == (regime, arm)]
    return sorted(runs, key=lambda run: int(run["seed"]))
