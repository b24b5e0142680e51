"""The charts of a report as figures of plotly: `{"data": traces, "layout": ...}`, which is JSON.

report.js draws the figures with the page's theme. Colours are names of variables in report.css:
`var(--g1)` for the second group. plotly takes fixed colours only, so the script replaces each name
by its value in the light or the dark page. `legendgroup` names the group of a trace.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_r3.loop.report_contents import LOG, MAP, OFF_ZERO, PERCENT, STAGES, Chart
from megatron_r3.loop.report_numbers import Groups, Line, duration, lines_of, number
from megatron_r3.replay.words import one_line

COLOURS = 8  # of groups, in report.css; the ninth group has the first colour and dashed lines
Drawn = tuple[list[dict[str, Any]], dict[str, Any]]  # traces, and a layout
Lines = Mapping[str, Line]  # of a group, by name


def figures_of(chart: Chart, groups: Groups) -> list[dict[str, Any]]:
    """One figure for all groups, or one for each with the same axes; none if there are no values.

    The page reads `title`, `text` and `group`: the number of the figure's group, None for all.
    """
    of_groups = [lines_of(chart, group) for group in groups.values()]
    every = [line for lines in of_groups for line in lines.values()]
    if not every:
        return []
    text, each = chart.text, max(line.each for line in every)
    if any(", first steps" in lines for lines in of_groups):
        text += " Dashed: the first step on each collection; in later steps the trainer moves away."
    if each > 1:
        text += f" Each point is a mean over up to {each} neighbouring {chart.x}s."
    first, last = min(line.x[0] for line in every), max(line.x[-1] for line in every)
    room = max(0.5, 0.015 * (last - first))  # so that no mark, bar or cell at the edge is cut
    x_axis = {
        "title": {"text": chart.x},
        "range": [first - room, last + room],
        "dtick": 1 if last - first < 8 else None,  # there is no step 1.5
        "unifiedhovertitle": {"text": f"{'around ' if each > 1 else ''}{chart.x} %{{x}}"},
    }
    drawn: list[tuple[int | None, Drawn]]
    if MAP in chart.look or STAGES in chart.look:
        draw = _map if MAP in chart.look else _stages
        drawn = [(at, draw(chart, lines, of_groups)) for at, lines in enumerate(of_groups) if lines]
    else:
        drawn = [(None, _lines(chart, [*groups], of_groups))]
    words = {"title": chart.title, "text": text}
    return [
        {**words, "group": at, "data": traces, "layout": {**layout, "xaxis": x_axis}}
        for at, (traces, layout) in drawn
    ]


def _lines(chart: Chart, names: Sequence[str], of_groups: Sequence[Lines]) -> Drawn:
    """Lines with bands; lines and bands are cut off at the least value of the y axis."""
    every = [line for lines in of_groups for line in lines.values()]
    least, highest = min(min(line.low) for line in every), max(max(line.high) for line in every)
    above_0 = min((y for line in every for y in line.mean if y > 0), default=0.0)
    percent = PERCENT in chart.look
    axis: dict[str, Any] = {"tickformat": ".4~%"} if percent else {}
    if LOG in chart.look and 0 < 30 * above_0 < highest:
        axis["type"] = "log"
        least = above_0  # a logarithmic axis has no 0: zeros are drawn at the least value above 0
    elif OFF_ZERO not in chart.look:
        axis["rangemode"] = "tozero"
    elif least > 0.9 and highest <= 1:
        # Shares that should be 1: end the axis just above 1, and do not magnify tiny differences.
        axis["range"] = [min(0.99, 2 * least - 1), 1.0005]
    traces = []
    for at, what, line in ((at, *one) for at, of in enumerate(of_groups) for one in of.items()):
        # escaped, since plotly would make a link of `<a href=...>` in a name
        name = html.escape(one_line(names[at] + what, 200), quote=False)
        colour, both = f"var(--g{at % COLOURS}", {"type": "scatter", "legendgroup": f"g{at}"}
        if not what and line.low != line.high:
            band = [max(y, least) for y in (*line.high, *reversed(line.low))]
            x = [*line.x, *reversed(line.x)]
            fill = {"fill": "toself", "fillcolor": f"{colour}-band)", "line": {"width": 0}}
            traces.append({**both, **fill, "mode": "lines", "hoverinfo": "skip", "x": x, "y": band})
        dash = "dash" if what or at >= COLOURS else "solid"
        words = [
            f"{name}: {number(mean, percent)}"
            + (f" ({number(low, percent)} to {number(high, percent)})" if low != high else "")
            for mean, low, high in zip(line.mean, line.low, line.high, strict=True)
        ]
        trace = {
            # Few points get marks: a single point would not show as a line.
            "mode": "lines" if len(line.x) > (1 if what else 24) else "lines+markers",
            "line": {"color": f"{colour})", "width": 1.3 if what else 2, "dash": dash},
            "x": line.x,
            "y": [max(y, least) for y in line.mean],
        }
        traces.append({**both, **trace, "name": name, "hoverinfo": "text", "hovertext": words})
    return traces, {"yaxis": axis}


def _stages(_: Chart, lines: Lines, of_groups: Sequence[Lines]) -> Drawn:
    """For each collection stacked bars, one for each stage."""
    means = [[line.mean for line in stages.values()] for stages in of_groups]
    highest = max(sum(stages) for of in means for stages in zip(*of, strict=True))
    axis = {"range": [0, 1.05 * highest or 1], "ticksuffix": " s"}
    traces = [
        {
            "type": "bar",
            "name": stage,
            "marker": {"color": f"var(--s{at})"},
            "x": line.x,
            "y": line.mean,
            "hoverinfo": "text",
            "hovertext": [f"{stage}: {duration(y)}" for y in line.mean],
        }
        for at, (stage, line) in enumerate(lines.items())
    ]
    return traces, {"barmode": "stack", "showlegend": True, "height": 280, "yaxis": axis}


def _map(chart: Chart, lines: Lines, of_groups: Sequence[Lines]) -> Drawn:
    """A heat map by layer. Colours go from 0 (of loads from 1) to the largest value of all maps."""
    lowest, form = (0, ".3~p") if PERCENT in chart.look else (1, ".3~g")
    highest = max(y for layers in of_groups for line in layers.values() for y in line.mean)
    x = sorted({x for line in lines.values() for x in line.x})
    cells = [dict(zip(line.x, line.mean, strict=True)) for line in lines.values()]
    trace = {
        "type": "heatmap",
        "x": x,
        "y": [*lines],
        "z": [[row.get(one) for one in x] for row in cells],  # null draws a hole: not measured
        "zmin": lowest,
        "zmax": highest if highest > lowest else lowest + 1,
        "colorbar": {"tickformat": form},
        "hovertemplate": f"{chart.x} %{{x}}, layer %{{y}}: %{{z:{form}}}<extra></extra>",
    }
    axis = {"type": "category", "title": {"text": "layer"}, "showgrid": False}
    return [trace], {"hovermode": "closest", "yaxis": axis}
