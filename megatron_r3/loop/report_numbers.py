"""From runs to what a report shows: groups of seeds, lines with bands, times by stage, warnings.

Runs whose names differ only in the number at the end (live-0, live-1, live-2) are seeds of one
experiment. A report shows the mean over the seeds, and a band from the smallest to the largest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from operator import add, truediv
from statistics import fmean
from typing import NamedTuple

from megatron_r3.loop.report import LAYER, Curve, Run
from megatron_r3.loop.report_contents import DRIFTS, MAP, STAGES, Chart

MOST_POINTS = 100  # of a line; a longer one is drawn as means over neighbouring points
STAGE_NAMES = ("sampling", "pushing weights", "waiting for a policy", "the rest")
Groups = dict[str, list[Run]]  # by name: the seeds of an experiment, or a single run


class Line(NamedTuple):
    """A line of a chart. In a long line each point is the mean of `each` neighbouring points."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    each: int


def groups_of(runs: Sequence[Run]) -> Groups:
    """The groups, in the order of their first runs."""
    seeds: dict[str, list[Run]] = {}
    for run in runs:
        seeds.setdefault(re.sub(r"-\d+$", "", run.name), []).append(run)
    # A run without other seeds keeps its whole name, with the number.
    return {name if len(of) > 1 else of[0].name: of for name, of in seeds.items()}


def line_of(curves: Sequence[Curve]) -> Line | None:
    """The mean line of the curves of a group's seeds; None if the curves share no x.

    A point is drawn only where every curve has one: else the mean would jump where a seed ends.
    Example: of seeds with 40, 40 and 31 steps, 31 steps are drawn.
    """
    filled = [curve for curve in curves if curve]
    x = sorted(set.intersection(*map(set, filled))) if filled else []
    if not x:
        return None
    each = math.ceil(len(x) / MOST_POINTS)
    near = [x[start : start + each] for start in range(0, len(x), each)]
    values = [[curve[i] for curve in filled for i in some] for some in near]
    # six digits are more than a chart can show
    mean, low, high = ([float(f"{f(some):.6g}") for some in values] for f in (fmean, min, max))
    return Line([*map(fmean, near)], mean, low, high, each)


def lines_of(chart: Chart, group: Sequence[Run]) -> dict[str, Line]:
    """The lines of a chart for one group, by their names in the legend or on an axis."""
    of_runs = [curves_of(chart, run) for run in group]
    names = dict.fromkeys(name for curves in of_runs for name in curves)
    lines = {name: line_of([curves.get(name, {}) for curves in of_runs]) for name in names}
    return {name: line for name, line in lines.items() if line}


def number(value: float, percent: bool = False) -> str:
    """Three digits, as 0.00412, 12.3, 1,234 or 1.23e-07; a share near 1 gets more: 99.996 %."""
    if percent:
        short = f"{100 * value:.3g}"
        # A share that is not 1 is not shown as 100 %.
        return f"{100 * value:.6g} %" if short == "100" and value != 1 else f"{short} %"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds in words: 9 ms, 12.3 s, 4 min 5 s, 3 h 12 min."""
    if seconds < 60:
        return f"{1000 * seconds:.0f} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


def curves_of(chart: Chart, run: Run) -> dict[str, Curve]:
    """The curves of a chart for one run: by layer, by stage, or one with its companions.

    Companions are the limit and, if a collection has several steps, a curve of the first steps
    alone: in later steps the trainer has moved away from the policy that sampled.
    """
    if STAGES in chart.look:
        return stage_times(run)
    if MAP in chart.look:
        return _by_layer(chart.source, run)
    curves, published = {"": curve(chart.source, run)}, run.of("published")
    if chart.limit:
        curves[", limit"] = curve(chart.limit, run)
    # Optimizer steps on a collection, from the newest event: iteration divided by version.
    pairs = ((event.get("iteration", 0), event["version"]) for event in reversed(published))
    each = next((steps // version for steps, version in pairs if version), 1)
    if DRIFTS in chart.look and each > 1:
        curves[", first steps"] = {x: y for x, y in curves[""].items() if (x - 1) % each == 0}
    return curves


def curve(source: str, run: Run) -> Curve:
    """The curve of a source (see `Chart`); if an x comes twice, its later value counts.

    Left out are values that are not finite, and of "NAME + NAME" or "NAME / NAME" each x that lacks
    one of the two values.
    """
    kind, of_event, name = source.partition(": ")
    points = run.metrics.get(source, {})
    if name == "all stages":
        times = [*stage_times(run).values()]
        points = {x: sum(stage[x] for stage in times) for x in times[0]}
    elif of_event:
        x = "collection" if kind == "collected" else "version"
        fold = {"expert_load": max, "route_agreement": min}.get(name, float)  # the worst layer
        events = [event for event in run.of(kind) if event.get(name) not in (None, [])]
        points = {event[x]: fold(event[name]) for event in events}
    for sign, of_two in ((" + ", add), (" / ", truediv)):
        if sign in source:
            left, right = (run.metrics.get(name, {}) for name in source.split(sign))
            both = [x for x in left if x in right and (right[x] or of_two is add)]
            points = {x: of_two(left[x], right[x]) for x in both}
    return {at: points[at] for at in sorted(points) if math.isfinite(points[at])}


def _by_layer(source: str, run: Run) -> dict[str, Curve]:
    """Curves by layer number from metrics; or from lists in events, numbered from 1 in order."""
    kind, _, name = source.partition(": ")
    layers = {at[len(LAYER) :]: of for at, of in run.metrics.items() if at.startswith(source)}
    for event in run.of(kind):
        for layer, value in enumerate(event.get(name, ()), start=1):
            if math.isfinite(value):
                layers.setdefault(str(layer), {})[event["collection"]] = value
    return dict(sorted(layers.items(), key=lambda of: int(of[0])))


def stage_times(run: Run) -> dict[str, Curve]:
    """Seconds of each stage by collection; the stages add up to the elapsed time.

    Waiting and pushing belong to the collection that follows them. "The rest" is the elapsed time
    without the measured stages: the time in which the collector was dead, for example. The first
    collection has a rest of 0, since no event says when that collection began.
    """
    times: dict[str, Curve] = {stage: {} for stage in STAGE_NAMES}
    spent = dict.fromkeys(("collected", "pushed", "waited"), 0.0)
    before: float | None = None
    for event in run.of(*spent):
        spent[event["event"]] += event.get("seconds", 0.0)
        if event["event"] == "collected":
            known = sum(spent.values())
            rest = 0.0 if before is None else max(event["time"] - before - known, 0.0)
            for stage, seconds in zip(STAGE_NAMES, (*spent.values(), rest), strict=True):
                times[stage][event["collection"]] = seconds
            spent, before = dict.fromkeys(spent, 0.0), event["time"]
    return times


def wall_seconds(run: Run) -> float | None:
    """Seconds in which the run was at work; None if there are no events.

    The time before an event `started` does not count if no part was running, or if the started part
    has no event `died` or `ended` since its last start: then the whole run was stopped meanwhile.
    """
    events = sorted(run.events, key=lambda event: event["time"])
    seconds, alive = 0.0, set[str]()
    for before, event in zip(events[:1] + events, events, strict=False):
        part, kind = event.get("part", ""), event["event"]
        if kind == "started" and (part in alive or not alive):
            alive = set()
        else:
            seconds += event["time"] - before["time"]
        if kind == "started":
            alive.add(part)
        elif kind in ("died", "ended"):
            alive.discard(part)
    return seconds if events else None


def warnings_of(run: Run) -> list[str]:
    """What is wrong in a run, one sentence each, the worst first."""
    found = [
        f"the push of version {event['version']} was not verified: |dlogp| is "
        f"{event.get('abs_dlogp', 'unknown')}, the limit is {event.get('limit', 'unknown')}"
        for event in run.of("pushed")
        if not event["verified"]
    ]
    for event in run.of("examined"):
        text = f"rollouts of version {event['version']} were not stored: "
        found += [text + alarm for alarm in event["alarms"]]
    verified = {event["version"] for event in run.of("pushed") if event["verified"]}
    if wrong := [event for event in run.of("collected") if event["version"] not in verified]:
        found.append(
            f"{len(wrong)} collections were sampled by a version whose push is not recorded as "
            f"verified, first: collection {wrong[0]['collection']} by version {wrong[0]['version']}"
        )
    # Only steps in which all routes were replayed from rollouts must dispatch them as recorded.
    replayed = run.metrics.get("update/routes from rollout", {})
    shares = run.metrics.get("routes dispatched as recorded", {})
    if steps := [step for step in shares if shares[step] < 1 and replayed.get(step) == 1]:
        found.append(
            f"routes dispatched as recorded is below 1 {_at(steps)}, with replay (lowest: "
            f"{min(shares[step] for step in steps):.6g}): stop, and run make fidelity MEGATRON=DIR"
        )
    bounded = run.metrics.get("bounded ratio", {})
    if steps := [step for step in bounded if bounded[step] > 0]:
        found.append(f"bounded ratio is above 0 {_at(steps)}")
    for layer, shares in _by_layer(LAYER, run).items():
        if steps := [step for step in shares if shares[step] > 0.5]:
            found.append(
                f"router mismatch is above one half in layer {layer} {_at(steps)}: the engine "
                "computes another model, or its router is noisy on purpose"
            )
    return found + _deaths(run)


def _deaths(run: Run) -> list[str]:
    """How often each part of a run died, one sentence for each part."""
    deaths: dict[str, list[str]] = {}
    for event in run.of("died"):
        deaths.setdefault(event["part"], []).append(str(event.get("status", "?")))
    return [
        f"the {part} died {'once' if len(status) == 1 else f'{len(status)} times'} "
        f"(exit status {', '.join(status)})"
        for part, status in sorted(deaths.items())
    ]


def _at(steps: Sequence[float]) -> str:
    return f"in {len(steps)} steps, first in {steps[0]}"


def replay_of(run: Run) -> str:
    """Whose experts the trainer used, from the metrics of its steps; empty without metrics."""
    names = {"rollout": "rollout (R3)", "old policy": "old policy (R2)"}
    shares = {name: run.metrics.get(f"update/routes from {name}", {}) for name in names}
    used = [f"routes from {names[name]}" for name in names if any(shares[name].values())]
    off = "off: the trainer chose its experts live" if any(shares.values()) else ""
    return f"on: {', '.join(used)}" if used else off


def notes_of(run: Run) -> list[str]:
    """What a reader should know to understand the numbers of a run."""
    found = [*run.notes]
    if (replay := replay_of(run)).startswith("off"):
        found.append(f"replay is {replay}; --moe-router-replay makes it use the sampler's")
    there = {event["collection"] for event in run.of("collected")}
    if gaps := max(there, default=-1) + 1 - len(there):
        first = next(number for number in range(len(there) + 1) if number not in there)
        found.append(
            f"{gaps} collections have no event, the first of them is {first}: the collector was "
            "killed after it had stored them; the counts of rollouts and tokens leave them out"
        )
    for event in run.of("failed"):
        found.append(f"collection {event['collection']} was begun anew: {event['reason']}")
    return found
