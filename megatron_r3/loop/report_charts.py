"""The charts of a report: what each shows, what is healthy (docs/metrics.md), and its figure.

A figure is `{"data": traces, "layout": ...}`, which is JSON; the page's script draws it.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_r3.loop.report import LAYER, Curve, Run
from megatron_r3.replay.words import one_line

# The colours of runs. Seeds of one experiment share a colour. All can be read on white and black.
COLOURS = ("#1f83c4", "#e0701e", "#109a6b", "#c64ea1", "#a98a12", "#8a6fd1", "#d6514a", "#7a8694")
STAGES = ("sampling", "pushing weights", "waiting for a policy", "the rest")
FIRST, LIMIT, CACHED = ", first steps", ", limit", ", with the prefix cache"


@dataclass(frozen=True)
class Chart:
    """What a chart shows, and what is healthy.

    Attributes:
        source: a name of metrics.jsonl, the beginning of such names (`LAYER`), "EVENT: FIELD", or
            the times of the stages of a collection.
        look: "percent", "first" (a dashed line has only the first step on each collection), "map"
            (a heat map by layer for each run) or "bars" (stacked, for each run), or several.
    """

    title: str
    source: str
    look: str
    text: str


# fmt: off
PARTS = {
    "Does the policy learn?": (
        Chart("Reward", "update/reward mean", "",
            "Mean reward of the rollouts of a step. Healthy: it rises, and then stays up."),
        Chart("Groups with one reward", "update/groups with one reward", "percent",
            "Share of rollouts in groups with equal rewards: they teach nothing. Healthy: few."),
        Chart("Entropy", "update/entropy", "",
            "How undecided the policy is. Healthy: a slow fall; at 0 nothing is explored."),
        Chart("Response length", "update/response length", "",
            "Mean tokens. Healthy: no jumps. A rise to the limit without reward is a warning."),
        Chart("Responses cut at the longest length", "collected: length_cut", "percent",
            "Share of responses that max_tokens cut off. Healthy: low, and not rising."),
        Chart("Turns of a rollout", "collected: turns", "",
            "Mean number of responses of an agent's session; 1 without an agent."),
        Chart("Learning rate", "update/learning rate", "",
            "As Megatron logs it. With smaller steps the policy drifts less within a collection."),
        Chart("Gradient norm", "update/gradient norm", "",
            "Before clipping. Healthy: level, without single steps that are many times higher."),
    ),
    "Do sampler and trainer agree?": (
        Chart("KL from sampler to trainer (k3)", "update/sampler k3 kl", "first",
            "How far their probabilities differ. Healthy: near 0, and without a lasting rise."),
        Chart("Extreme tokens, F(2)", "update/sampler extreme", "percent first",
            "Share of tokens with probabilities more than a factor of 2 apart. Healthy: 0 %."),
        Chart("Effective sample size", "update/effective sample size", "first",
            "Share of a step that the correction's weights keep. Healthy: near 1. It is 1 without "
            "a correction."),
        Chart("Router mismatch", "router mismatch", "percent first",
            "Share of (token, layer) pairs where the trainer's router would choose other experts "
            "than the sampler. Healthy: some percent. With replay the sampler's experts are used."),
        Chart("Token mismatch", "token mismatch", "percent first",
            "Share of tokens with other experts in at least one layer; large with many layers."),
        Chart("Routes dispatched as recorded", "routes dispatched as recorded", "percent",
            "Share of recorded token-expert pairs. Healthy: exactly 100 % with replay, less live."),
        Chart("Router mismatch by layer", LAYER, "percent map",
            "Yellow is the most. Healthy: somewhat more in deep layers; no layer stands out, and "
            "nothing jumps at a step."),
        Chart("Busiest expert by layer", "collected: expert_load", "map",
            "Its tokens divided by the mean over experts; 1 is an even load. Healthy: no layer "
            "drifts to yellow. Layers are counted from 1 among the MoE layers."),
    ),
    "Does the loop run well?": (
        Chart("Policy lag", "update/policy lag", "",
            "How many versions the sampler is behind. Healthy: as configured. 0 is on-policy."),
        Chart("Check of each push", "pushed: abs_dlogp", "",
            "Mean |difference of log-probs| between sampler and trainer on fixed tokens, and the "
            "largest one with the sampler's prefix cache. Above the dashed limit the run stops."),
        Chart("Routes that agree after a push", "pushed: route_agreement", "percent",
            "Share of fixed tokens with the trainer's experts, in the worst layer. Healthy: as "
            "for the first version."),
        Chart("Truth test of each collection", "examined: mismatch", "percent",
            "Share of (row, layer) pairs of some rollouts with other experts than those of "
            "transformers under the same policy. Healthy: as at the start."),
        Chart("Seconds of a step", "update/seconds", "",
            "Without the wait for rollouts, checkpoints and publishing. Healthy: level."),
        Chart("Where the time goes", "collected: stages", "bars",
            "Seconds of each collection by stage. The collector waits for a policy while the "
            "trainer trains. Healthy: little of \"the rest\", and no growth."),
    ),
}
# fmt: on


def figures_of(chart: Chart, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One figure for all runs or, for maps and bars, one for each run; none without values.

    The page reads `title` and `text`; plotly gets `data` and `layout`.
    """
    x_axis = "step"
    if ": " in chart.source:
        x_axis = "collection" if chart.source.startswith("collected") else "policy version"
    layout: dict[str, Any] = {"xaxis": {"title": {"text": x_axis}}, "yaxis": {}}
    if "percent" in chart.look:
        layout["yaxis"]["tickformat"] = ".4~%"
    if "map" not in chart.look and "bars" not in chart.look:
        layout["yaxis"]["rangemode"] = "tozero"
        layout["showlegend"] = len(runs) > 1
        data = [trace for run in runs for trace in _lines(chart, run, _colour(run, runs))]
        figure = {"title": chart.title, "text": chart.text, "data": data, "layout": layout}
        return [figure] if data else []
    figures = []
    for run in runs:
        if "bars" in chart.look:
            layout |= {"barmode": "stack", "showlegend": True}
            data = [_trace("bar", stage, curve) for stage, curve in stage_times(run).items()]
        else:
            layout["yaxis"] = {"type": "category", "title": {"text": "layer"}}
            data = _map(by_layer(chart.source, run), "percent" in chart.look)
        if any(trace["x"] for trace in data):
            title = f"{chart.title}: {run.name}" if len(runs) > 1 else chart.title
            figures.append({"title": title, "text": chart.text, "data": data, "layout": layout})
    return figures


def _colour(run: Run, runs: Sequence[Run]) -> str:
    """The colour of a run; live-0 and live-1, which differ in the number only, have the same."""
    experiments = [*dict.fromkeys(re.sub(r"-\d+$", "", one.name) for one in runs)]
    return COLOURS[experiments.index(re.sub(r"-\d+$", "", run.name)) % len(COLOURS)]


def _trace(kind: str, name: str, curve: Curve) -> dict[str, Any]:
    # escaped, since plotly would make a link of `<a href=...>` in a name
    shown = html.escape(one_line(name, 200), quote=False)
    return {"type": kind, "name": shown, "x": [*curve], "y": [*curve.values()]}


def _lines(chart: Chart, run: Run, colour: str) -> list[dict[str, Any]]:
    """The traces of a run in a chart: its line, and beside it dashed and dotted lines."""
    curves = {"": curve_of(chart.source, run)}
    if chart.source == "pushed: abs_dlogp":
        curves[CACHED] = curve_of("pushed: cached_dlogp", run)
        curves[LIMIT] = curve_of("pushed: limit", run)
    # `each` is the number of optimizer steps on a collection, from the newest event that tells it.
    # After the first of these steps the trainer has moved away from the policy that sampled.
    pairs = ((e.get("iteration", 0), e["version"]) for e in reversed(run.of("published")))
    each = next((steps // version for steps, version in pairs if version), 1)
    if "first" in chart.look and each > 1:
        curves[FIRST] = {x: y for x, y in curves[""].items() if (x - 1) % each == 0}
    dashes = {"": "solid", CACHED: "dot"}
    return [
        {
            **_trace("scatter", run.name + what, curve),
            "mode": "lines+markers" if len(curve) < 25 else "lines",  # a point alone is no line
            "line": {"color": colour, "dash": dashes.get(what, "dash")},
        }
        for what, curve in curves.items()
        if curve
    ]


def _map(layers: dict[str, Curve], is_share: bool) -> list[dict[str, Any]]:
    x = sorted({x for curve in layers.values() for x in curve})
    cells = [[curve.get(one) for one in x] for curve in layers.values()]  # None draws a hole
    form = {"tickformat": ".3~p" if is_share else ".3~g"}
    least = 0 if is_share else 1
    colours = {"colorscale": "Viridis", "zmin": least, "colorbar": form}  # yellow is the most
    return [{"type": "heatmap", "x": x, "y": [*layers], "z": cells, **colours}]


def curve_of(source: str, run: Run) -> Curve:
    """The finite values of a source (see `Chart`) by step, collection or version.

    A list counts with its smallest value. If a collection or version comes twice, the later value
    counts.
    """
    kind, of_event, name = source.partition(": ")
    if not of_event:
        return run.metrics.get(source, {})
    x = "collection" if kind == "collected" else "version"
    points = {}
    for event in run.of(kind):
        value = event.get(name)
        if isinstance(value, list):
            value = min(value, default=None)  # the worst layer
        if value is not None and math.isfinite(value):
            points[event[x]] = value
    return dict(sorted(points.items()))


def by_layer(source: str, run: Run) -> dict[str, Curve]:
    """A curve for each layer number, made from metrics or from the lists of events.

    The layers of a list are numbered from 1, in the order of its values.
    """
    kind, _, name = source.partition(": ")
    layers = {at[len(LAYER) :]: of for at, of in run.metrics.items() if at.startswith(source)}
    for event in run.of(kind):
        for layer, value in enumerate(event.get(name, ()), start=1):
            if math.isfinite(value):
                layers.setdefault(str(layer), {})[event["collection"]] = value
    return dict(sorted(layers.items(), key=lambda of: int(of[0])))


def stage_times(run: Run) -> dict[str, Curve]:
    """Seconds of each stage by collection; they add up to the time since the collection before.

    Waiting and pushing belong to the collection that follows them. "The rest" is that time without
    the measured stages: the time in which the collector was dead, for example. The first collection
    has a rest of 0, since no event says when that collection began.
    """
    times: dict[str, Curve] = {stage: {} for stage in STAGES}
    spent = dict.fromkeys(("collected", "pushed", "waited"), 0.0)
    before: float | None = None
    for event in run.of(*spent):
        spent[event["event"]] += event.get("seconds", 0.0)
        if event["event"] == "collected":
            known = sum(spent.values())
            rest = 0.0 if before is None else max(event["time"] - before - known, 0.0)
            for stage, seconds in zip(STAGES, (*spent.values(), rest), strict=True):
                times[stage][event["collection"]] = seconds
            spent, before = dict.fromkeys(spent, 0.0), event["time"]
    return times
