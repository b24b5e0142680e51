"""From runs to what a report shows: groups of seeds, lines with bands, times by stage, warnings.

Runs of one name but for a number at its end (live-0, live-1, live-2) are seeds of one experiment.
A report shows their mean, and a band from the smallest to the largest of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from megatron_r3.loop.report import LAYER, Curve, Run

MOST_POINTS = 100  # of a line; a longer one is drawn as means over neighbouring points
STAGES = ("sampling", "pushing weights", "waiting for a policy", "the rest")


@dataclass(frozen=True)
class Group:
    """Seeds of one experiment, or a run that has no other seed."""

    name: str
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        """What the legend calls the group."""
        return self.name if len(self.runs) == 1 else f"{self.name} (mean of {len(self.runs)})"


@dataclass(frozen=True)
class Line:
    """One line of a chart: at each x the mean, the smallest and the largest of what is there.

    `each` says how many neighbouring points of a run one point of the line stands for.
    """

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    each: int = 1


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """The groups, in the order of their first runs."""
    seeds: dict[str, list[Run]] = {}
    for run in runs:
        seeds.setdefault(re.sub(r"-\d+$", "", run.name), []).append(run)
    return [
        # A number at the end of a name means nothing where no other run has the name.
        Group(base if len(members) > 1 else members[0].name, tuple(members))
        for base, members in seeds.items()
    ]


def line_of(curves: Sequence[Curve]) -> Line | None:
    """The line of the curves of a group's seeds; None if no curve has a point.

    A mean over other seeds at each x would jump where one of them ends. So a point is drawn only
    where every curve has one. Example: of seeds with 40, 40 and 31 steps, 31 steps are drawn.
    """
    filled = [curve for curve in curves if curve]
    x = sorted(set.intersection(*map(set, filled))) if filled else []
    if not x:
        return None
    each = math.ceil(len(x) / MOST_POINTS)
    line = Line([], [], [], [], each)
    for start in range(0, len(x), each):
        near = x[start : start + each]
        values = [curve[i] for curve in filled for i in near]
        line.x.append(fmean(near))
        line.mean.append(fmean(values))
        line.low.append(min(values))
        line.high.append(max(values))
    return line


def thirds(curve: Curve) -> tuple[float, float] | None:
    """The means of the first and the last third of a curve; of less than three points, its ends."""
    values = [curve[x] for x in sorted(curve)]
    third = max(len(values) // 3, 1)
    return (fmean(values[:third]), fmean(values[-third:])) if values else None


def number(value: float, percent: bool = False) -> str:
    """Three digits, as 0.00412, 12.3, 1,234 or 1.23e-07; of a share near 1 more, as 99.996 %."""
    if percent:
        short = f"{100 * value:.3g}"
        # A share that is not 1 is not shown as 100 %.
        return f"{100 * value:.6g} %" if short == "100" and value != 1 else f"{short} %"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds in words: 9 ms, 12.3 s, 4 min 5 s, 3 h 12 min."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s"


# -- the curves of a run


def metric(*names: str) -> Callable[[Run], Curve]:
    """A function that gives the sum of names in metrics.jsonl, at the steps that have them all."""

    def summed(run: Run) -> Curve:
        curves = [run.metrics.get(name, {}) for name in names]
        return {step: sum(c[step] for c in curves) for step in curves[0] if _in_all(step, curves)}

    return summed


def _in_all(step: float, curves: Sequence[Curve]) -> bool:
    return all(step in curve for curve in curves)


def first_steps(curve: Callable[[Run], Curve]) -> Callable[[Run], Curve]:
    """A function that gives of a curve the first step of each collection.

    Empty where a collection has one step. In the later ones of a collection the trainer has moved
    away from the policy that sampled it, whatever their numerics.
    """

    def firsts(run: Run) -> Curve:
        each = run.steps_each
        return {x: y for x, y in curve(run).items() if each > 1 and (x - 1) % each == 0}

    return firsts


def tokens_a_second(run: Run) -> Curve:
    """Tokens that a step trains on, prompts included, by the seconds that it takes."""
    tokens, seconds = (run.metrics.get(f"update/{name}", {}) for name in ("tokens", "seconds"))
    return {step: tokens[step] / s for step, s in seconds.items() if step in tokens and s}


def of_events(
    kind: str, x: str, value: str, fold: Callable[[Any], float] = float
) -> Callable[[Run], Curve]:
    """A function that gives a field of events as a curve; of an x that came twice the later counts.

    Args:
        kind: the events, such as "collected".
        x, value: the names of fields.
        fold: makes a number of the value. A result that is not finite is left out.
    """

    def curve(run: Run) -> Curve:
        events = [event for event in run.of(kind) if event.get(value) not in (None, [])]
        points = {event[x]: fold(event[value]) for event in events}
        return {at: points[at] for at in sorted(points) if math.isfinite(points[at])}

    return curve


def mismatch_by_layer(run: Run) -> dict[int, Curve]:
    """The router mismatch by Megatron's number of the layer, and by step."""
    names = [name.removeprefix(LAYER) for name in run.metrics if name.startswith(LAYER)]
    return {int(name): run.metrics[f"{LAYER}{name}"] for name in sorted(names, key=int)}


def load_by_layer(run: Run) -> dict[int, Curve]:
    """The largest load of an expert divided by the mean, by MoE layer (from 1) and collection."""
    layers: dict[int, Curve] = {}
    for event in run.of("collected"):
        for number, load in enumerate(event.get("expert_load", ()), start=1):
            if math.isfinite(load):
                layers.setdefault(number, {})[event["collection"]] = load
    return layers


def stage_times(run: Run) -> dict[str, Curve]:
    """Seconds of each of `STAGES` by collection; all of them together are the time on the clock.

    Waiting and pushing belong to the collection that follows them. "The rest" is what the clock
    says beyond the measured stages: rewards, storing, and the time in which the collector was dead.
    It is 0 for the first collection, since nothing says when that began.
    """
    times: dict[str, Curve] = {stage: {} for stage in STAGES}
    waited = pushed = 0.0
    before: float | None = None
    for event in run.of("waited", "pushed", "collected"):
        seconds = event.get("seconds", 0.0)
        if event["event"] == "waited":
            waited += seconds
        elif event["event"] == "pushed":
            pushed += seconds
        else:
            known = waited + pushed + seconds
            clock = known if before is None else event["time"] - before
            values = (seconds, pushed, waited, max(clock - known, 0.0))
            for stage, value in zip(STAGES, values, strict=True):
                times[stage][event["collection"]] = value
            waited, pushed, before = 0.0, 0.0, event["time"]
    return times


def seconds_of_collections(run: Run) -> Curve:
    """Seconds on the clock of each collection."""
    times = [*stage_times(run).values()]
    return {collection: sum(curve[collection] for curve in times) for collection in times[0]}


def wall_seconds(run: Run) -> float | None:
    """Seconds in which the run was at work, without its pauses; None if there are no events."""
    times = [event["time"] for event in run.events]
    return max(times) - min(times) - sum(b - a for a, b in pauses(run)) if times else None


def pauses(run: Run) -> list[tuple[float, float]]:
    """When the run was stopped, and when it was started again.

    It was if a part is started that had not ended, or while no part is at work.
    """
    found, before, alive = [], None, set[str]()
    for event in sorted(run.events, key=lambda event: event["time"]):
        part, kind = event.get("part", ""), event["event"]
        if kind == "started":
            if before is not None and (part in alive or not alive):
                found.append((before, event["time"]))
                alive = set()
            alive.add(part)
        elif kind in ("died", "ended"):
            alive.discard(part)
        before = event["time"]
    return found


# -- what a reader must not miss


def warnings_of(run: Run) -> list[str]:
    """What is wrong in a run, one sentence each, the worst first."""
    found = []
    for event in run.of("pushed"):
        if not event["verified"]:
            found.append(
                f"the push of version {event['version']} was not verified: |dlogp| is "
                f"{event.get('abs_dlogp', 'unknown')}, the limit is {event.get('limit', 'unknown')}"
            )
    for event in run.of("examined"):
        found += [
            f"rollouts of version {event['version']} were not stored: {alarm}"
            for alarm in event["alarms"]
        ]
    found += _sampled_unchecked(run) + _not_dispatched(run)
    bounded = [step for step, share in run.metrics.get("bounded ratio", {}).items() if share > 0]
    if bounded:
        found.append(f"bounded ratio is above 0 in {len(bounded)} steps, first in {bounded[0]}")
    for layer, curve in mismatch_by_layer(run).items():
        if high := [step for step, share in curve.items() if share > 0.5]:
            found.append(
                f"router mismatch is above one half in layer {layer} in {len(high)} steps, first "
                f"in {high[0]}: the engine computes another model, or its router is noisy on "
                "purpose"
            )
    died = run.of("died")
    for part in sorted({event["part"] for event in died}):
        status = [str(event.get("status", "?")) for event in died if event["part"] == part]
        times = "once" if len(status) == 1 else f"{len(status)} times"
        found.append(f"the {part} died {times} (exit status {', '.join(status)})")
    return found


def _sampled_unchecked(run: Run) -> list[str]:
    """Collections by a version whose push no event calls verified."""
    verified = {event["version"] for event in run.of("pushed") if event["verified"]}
    wrong = [event for event in run.of("collected") if event["version"] not in verified]
    if not wrong:
        return []
    first = wrong[0]
    return [
        f"{len(wrong)} collections were sampled by a version whose push is not recorded as "
        f"verified, first collection {first['collection']} by version {first['version']}"
    ]


def _not_dispatched(run: Run) -> list[str]:
    """Steps that replayed every route and in which not every token reached its experts.

    Live training has no promise to keep, so only steps count whose routes all are the rollout's.
    """
    replayed = run.metrics.get("update/routes from rollout", {})
    shares = run.metrics.get("routes dispatched as recorded", {})
    wrong = [step for step, share in shares.items() if share < 1 and replayed.get(step) == 1]
    if not wrong:
        return []
    lowest = min(shares[step] for step in wrong)
    return [
        f"routes dispatched as recorded is below 1 in {len(wrong)} steps with replay, first in "
        f"{wrong[0]} (lowest: {lowest:.6g}): stop, and run make fidelity MEGATRON=DIR"
    ]


def replay_of(run: Run) -> str:
    """Whose experts the trainer used, from what its steps measured; empty if they did not."""
    shares = {
        f"routes from {name}": run.metrics.get(f"update/routes from {name.partition(' (')[0]}", {})
        for name in ("rollout (R3)", "old policy (R2)")
    }
    used = [name for name, curve in shares.items() if any(curve.values())]
    measured = any(shares.values())
    off = "off: the trainer chose its experts live" if measured else ""
    return f"on: {', '.join(used)}" if used else off


def notes_of(run: Run) -> list[str]:
    """What a reader of the numbers must know of a run."""
    found = [*run.notes]
    if (replay := replay_of(run)).startswith("off"):
        found.append(f"replay is {replay}; with --moe-router-replay it takes the sampler's")
    collected = {event["collection"] for event in run.of("collected")}
    if gaps := sorted(set(range(max(collected, default=-1) + 1)) - collected):
        found.append(
            f"{len(gaps)} collections have no event, the first of them is {gaps[0]}: the collector "
            "was killed after it had stored them; counts of rollouts and tokens lack them"
        )
    for event in run.of("failed"):
        found.append(f"collection {event['collection']} was begun anew: {event['reason']}")
    return found
