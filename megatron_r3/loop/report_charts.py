"""The charts of a report as figures of plotly: `{"data": traces, "layout": ...}`, which is JSON.

The page's script draws them over its own theme. Colours are variables of report.css, as `var(--g1)`
for the second group, since plotly takes fixed colours and the page is light or dark: the script
puts the values of the moment in their place. A trace belongs to the group in `legendgroup`.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_r3.loop import report_numbers as numbers
from megatron_r3.loop.report import Curve, Run
from megatron_r3.loop.report_contents import DRIFTS, LOG, OFF_ZERO, PERCENT, Chart
from megatron_r3.loop.report_numbers import STAGES, Group, Line, line_of, number
from megatron_r3.replay.words import one_line

COLOURS = 8  # of groups, in report.css; later groups take the same ones, with dashes
Key = TypeVar("Key", int, str)


@dataclass(frozen=True)
class Card:
    """A chart with its words; `group` is the number of its group, if it shows only one."""

    title: str
    text: str
    figure: dict[str, Any]
    group: int | None = None


def shown(text: str) -> str:
    """A text of a run for plotly, which makes a link of `<a href=...>` in a text."""
    return html.escape(one_line(text, 200), quote=False)


def lines(chart: Chart, groups: Sequence[Group]) -> Card | None:
    """Lines with bands on one pair of axes; None if no run has the values of the chart."""
    curves = {"": chart.curve}
    if chart.limit:
        curves[", limit"] = chart.limit
    if DRIFTS in chart.look:
        curves[", first steps"] = numbers.first_steps(chart.curve)
    drawn = [
        (at, what, line)
        for at, group in enumerate(groups)
        for what, curve in curves.items()
        if (line := line_of([curve(run) for run in group.runs]))
    ]
    if not drawn:
        return None
    all_lines = [line for *_, line in drawn]
    least = min(min(line.low) for line in all_lines)
    highest = max(max(line.high) for line in all_lines)
    above_0 = min((y for line in all_lines for y in line.mean if y > 0), default=0.0)
    axis: dict[str, Any] = {"tickformat": ".4~%"} if PERCENT in chart.look else {}
    if LOG in chart.look and 0 < 30 * above_0 < highest:
        axis["type"] = "log"
        least = above_0  # zeros stand at the bottom, where the least value above 0 stands
    elif OFF_ZERO not in chart.look:
        axis["rangemode"] = "tozero"
    elif least > 0.9 and highest <= 1:
        # Shares that should be 1: the axis ends there, and one of exactly 1 is no small wave.
        axis["range"] = [min(0.99, 2 * least - 1), 1.0005]
    traces = []
    for at, what, line in drawn:
        name = f"{groups[at].name}{what}"
        traces += _trace(at, name, bool(what), line, least, PERCENT in chart.look)
    text = chart.text
    if any(what == ", first steps" for _, what, _ in drawn):
        text += " Dashed: the first step on each collection; in later ones the trainer moves away."
    if (each := max(line.each for line in all_lines)) > 1:
        text += f" Each point is a mean over up to {each} neighbouring {chart.x}s."
    return Card(chart.title, text, _figure(traces, chart.x, all_lines, axis))


def _trace(
    at: int, name: str, dashed: bool, line: Line, least: float, percent: bool
) -> list[dict[str, Any]]:
    """One line and its band, neither of which goes below the least value of the axis."""
    colour = f"var(--g{at % COLOURS}"
    words = [
        f"{shown(name)}: {number(mean, percent)}"
        + (f" ({number(low, percent)} to {number(high, percent)})" if low != high else "")
        for mean, low, high in zip(line.mean, line.low, line.high, strict=True)
    ]
    dash = "dash" if dashed or at >= COLOURS else "solid"
    both = {"type": "scatter", "legendgroup": f"g{at}"}
    trace = {
        **both,
        "name": shown(name),
        # A line of one point is no line: points are marked where they are few.
        "mode": "lines" if len(line.x) > (1 if dashed else 24) else "lines+markers",
        "line": {"color": f"{colour})", "width": 1.3 if dashed else 2, "dash": dash},
        "x": _short(line.x),
        "y": _short(max(y, least) for y in line.mean),
        "hoverinfo": "text",
        "hovertext": words,
    }
    band = {
        **both,
        "mode": "lines",
        "line": {"width": 0},
        "fill": "toself",
        "fillcolor": f"{colour}-band)",
        "hoverinfo": "skip",
        "x": _short([*line.x, *reversed(line.x)]),
        "y": _short(max(y, least) for y in (*line.high, *reversed(line.low))),
    }
    return [trace] if dashed or line.low == line.high else [band, trace]


def stacks(groups: Sequence[Group]) -> list[Card]:
    """Times by stage of each collection, one chart for each group, all with the same axes."""
    text = (
        "Seconds of each collection by stage; sampling is the collector's own work, and it waits "
        "while the trainer trains. Healthy: little of the rest, and no growth."
    )
    of_groups = [_lines_of(group, numbers.stage_times) for group in groups]
    all_lines = [line for stages in of_groups for line in stages.values()]
    sums = [sum(y) for of in of_groups for y in zip(*(p.mean for p in of.values()), strict=True)]
    axis = {"range": [0, 1.05 * max(sums, default=0) or 1], "ticksuffix": " s"}
    cards = []
    for at, stages in enumerate(of_groups):
        traces = [
            {
                "type": "bar",
                "name": stage,
                "marker": {"color": f"var(--s{STAGES.index(stage)})", "line": {"width": 0}},
                "x": _short(line.x),
                "y": _short(line.mean),
                "hoverinfo": "text",
                "hovertext": [f"{stage}: {numbers.duration(y)}" for y in line.mean],
            }
            for stage, line in stages.items()
        ]
        if traces:
            figure = _figure(traces, "collection", all_lines, axis)
            figure["layout"] |= {"barmode": "stack", "showlegend": True, "height": 280}
            cards.append(Card("Where the time goes", text, figure, at))
    return cards


def mismatch_maps(groups: Sequence[Group]) -> list[Card]:
    """The router mismatch by layer and step, a map for each group."""
    text = (
        "Upwards the layer, to the right the step; yellow is the most. Healthy: somewhat more in "
        "deep layers; no layer stands out, and nothing jumps at a step. Stripes: the trainer moves "
        "away within the steps on a collection."
    )
    return _maps("Router mismatch by layer", text, groups, numbers.mismatch_by_layer, "step", 0)


def load_maps(groups: Sequence[Group]) -> list[Card]:
    """The load of the busiest expert by layer and collection, a map for each group."""
    text = (
        "Its tokens divided by the mean over experts; 1 is an even load. Healthy: no layer drifts "
        "to yellow. Layers are counted from 1 among the MoE layers."
    )
    return _maps("Busiest expert by layer", text, groups, numbers.load_by_layer, "collection", 1)


def _maps(
    title: str,
    text: str,
    groups: Sequence[Group],
    by_layer: Callable[[Run], dict[int, Curve]],
    x_name: str,
    lowest: float,
) -> list[Card]:
    """Maps with the same axes and colours, which go from `lowest` to the largest value of all."""
    of_groups = [_lines_of(group, by_layer) for group in groups]
    all_lines = [line for rows in of_groups for line in rows.values()]
    highest = max((y for line in all_lines for y in line.mean), default=lowest)
    form = ".3~p" if x_name == "step" else ".3~g"
    cards = []
    for at, rows in enumerate(of_groups):
        x = sorted({x for line in rows.values() for x in line.x})
        cells = [dict(zip(line.x, _short(line.mean), strict=True)) for line in rows.values()]
        trace = {
            "type": "heatmap",
            "x": _short(x),
            "y": [str(layer) for layer in rows],
            "z": [[row.get(one) for one in x] for row in cells],  # null, a hole, if not measured
            "zmin": lowest,
            "zmax": highest if highest > lowest else lowest + 1,
            "colorscale": "Viridis",
            "colorbar": {"thickness": 12, "outlinewidth": 0, "tickformat": form},
            "hoverongaps": False,
            "hovertemplate": f"{x_name} %{{x}}, layer %{{y}}: %{{z:{form}}}<extra></extra>",
        }
        if rows:
            axis = {"type": "category", "title": {"text": "layer"}, "showgrid": False}
            figure = _figure([trace], x_name, all_lines, axis)
            figure["layout"]["hovermode"] = "closest"
            cards.append(Card(title, text, figure, at))
    return cards


def _lines_of(group: Group, curves_of: Callable[[Run], Mapping[Key, Curve]]) -> dict[Key, Line]:
    """The lines of a group by the names of their curves, such as the numbers of layers."""
    of_runs = [curves_of(run) for run in group.runs]
    names = dict.fromkeys(name for curves in of_runs for name in curves)
    lines = {name: line_of([curves.get(name, {}) for curves in of_runs]) for name in names}
    return {name: line for name, line in lines.items() if line}


def _figure(
    traces: list[dict[str, Any]], x_name: str, all_lines: Sequence[Line], y_axis: dict[str, Any]
) -> dict[str, Any]:
    """The traces, and an x axis that holds all the lines."""
    first = min(line.x[0] for line in all_lines)
    last = max(line.x[-1] for line in all_lines)
    room = max(0.5, 0.015 * (last - first))  # a mark, a bar or a cell at the edge is not cut
    around = "around " if max(line.each for line in all_lines) > 1 else ""
    x_axis = {
        "title": {"text": x_name},
        "range": [first - room, last + room],
        "dtick": 1 if last - first < 8 else None,  # there is no step 1.5
        "unifiedhovertitle": {"text": f"{around}{x_name} %{{x}}"},
    }
    return {"data": traces, "layout": {"xaxis": x_axis, "yaxis": y_axis}}


def _short(values: Iterable[float]) -> list[float]:
    """Six digits are more than a reader can see."""
    return [float(f"{value:.6g}") for value in values]
