"""The charts of a report, drawn by matplotlib as SVG that a page holds and colours itself.

matplotlib writes fixed colours. A page that is light or dark needs others, so the charts are drawn
in colours that stand for something, and these become CSS variables: `#010200` is `var(--ink)`, and
`#010211` is `var(--g1)`, the colour of the second group. Nothing that a run wrote is drawn as text
here; names stand in the page, which escapes them.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from megatron_r3.loop.report_numbers import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 440, 230  # units of an SVG; a column of the page is about as wide in pixels
COLOURS = 8  # of groups, in report.css; later groups take the same ones, with dashes
_INK, _GRID, _GROUP, _STAGE = 0x00, 0x01, 0x10, 0x40  # the last two digits of colours, see above
_RC: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "megatron-r3",  # the same numbers give the same bytes
    "font.size": 11,
    "axes.edgecolor": f"#0102{_GRID:02x}",
    "axes.labelcolor": f"#0102{_INK:02x}",
    "xtick.color": f"#0102{_INK:02x}",
    "ytick.color": f"#0102{_INK:02x}",
    "grid.color": f"#0102{_GRID:02x}",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True)
class Drawn:
    """One chart: its SVG, and what the page's script shows where a reader points at it."""

    svg: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """A line of a chart: the number of its group, its words for a reader, whether it is a limit."""

    group: int
    name: str
    line: Line
    limit: bool = False


def check_matplotlib() -> None:
    """Import matplotlib, and say how to get it if it is not there.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "megatron-r3 rl report draws with matplotlib, which is not installed: "
            "pip install matplotlib"
        ) from error


def lines(
    traces: Sequence[Trace],
    x_name: str,
    percent: bool = False,
    from_zero: bool = False,
    log: bool = False,
) -> Drawn:
    """Lines with bands, on one pair of axes.

    Args:
        x_name: what the x axis counts, such as "step".
        percent: the values are shares, and are shown as percents.
        from_zero: the y axis begins at 0.
        log: the y axis is logarithmic where the largest mean is more than 30 times the smallest
            that is not 0. Zeros stand at its bottom.
    """
    with _style():
        figure, axes = _axes()
        for trace in traces:
            _trace(axes, trace)
        values = [y for trace in traces for y in (*trace.line.low, *trace.line.high)]
        means = [y for trace in traces for y in trace.line.mean]
        above = min((mean for mean in means if mean > 0), default=0.0)
        if log and 0 < 30 * above < max(means):
            _as_logarithms(axes, above, min(values) <= 0)
        elif from_zero:
            axes.set_ylim(min(0, *values), 1.08 * max(values) if max(values) > 0 else 1)
        elif min(values) > 0.9 and max(values) <= 1:
            # Shares that should be 1: the axis ends there, and one of exactly 1 is no small wave.
            axes.set_ylim(min(0.99, 2 * min(values) - 1), 1.0005)
        if percent:
            _as_percents(axes)
        _count_x(axes, [x for trace in traces for x in trace.line.x], x_name)
        axes.grid(axis="y", linewidth=0.8)
        svg, box = _svg(figure, axes)
    data = {
        **box,
        "xName": x_name,
        "percent": percent,
        "each": max(trace.line.each for trace in traces),
        "lines": [
            {
                "group": trace.group,
                "name": trace.name,
                "x": _short(trace.line.x),
                "mean": _short(trace.line.mean),
                "low": _short(trace.line.low),
                "high": _short(trace.line.high),
            }
            for trace in traces
        ],
    }
    return Drawn(svg, data)


def stacked(parts: Mapping[str, Line], x_name: str, ends: tuple[float, float], top: float) -> Drawn:
    """Bars of seconds one upon the other, in the order of the mapping, in the colours of stages.

    Args:
        ends, top: the first and the last x, and the highest bar, of all charts beside this one.
    """
    with _style():
        figure, axes = _axes()
        x = next(iter(parts.values())).x
        below = [0.0] * len(x)
        width = 0.85 * min((b - a for a, b in pairwise(x)), default=1)
        for number, line in enumerate(parts.values()):
            colour = f"#0102{_STAGE + number:02x}"
            axes.bar(x, line.mean, width, below, color=colour, linewidth=0)
            below = [a + b for a, b in zip(below, line.mean, strict=True)]
        axes.set_ylabel("seconds")
        axes.set_ylim(0, 1.05 * top or 1)
        _count_x(axes, [ends[0] - width / 2, ends[1] + width / 2], x_name)
        axes.grid(axis="y", linewidth=0.8)
        axes.set_axisbelow(True)
        svg, box = _svg(figure, axes)
    traces = [
        {"stage": number, "name": name, "x": _short(line.x), "mean": _short(line.mean)}
        for number, (name, line) in enumerate(parts.items())
    ]
    each = max(line.each for line in parts.values())
    data = {**box, "xName": x_name, "percent": False, "each": each, "lines": traces}
    return Drawn(svg, data)


def heat(
    rows: Mapping[int, Line],
    x_name: str,
    ends: tuple[float, float],
    colours: tuple[float, float],
    percent: bool,
) -> Drawn:
    """A map of values by layer (upwards) and x.

    Args:
        rows: a line for each layer.
        ends: the first and the last edge of a cell of all maps beside this one.
        colours: the values of the darkest and of the brightest colour of all maps beside this one.
    """
    import numpy as np

    x = sorted({at for line in rows.values() for at in line.x})
    values = np.full((len(rows), len(x)), math.nan)
    for row, line in enumerate(rows.values()):
        values[row, np.searchsorted(x, line.x)] = line.mean
    low, high = colours
    with _style():
        figure, axes = _axes()
        edges = edges_of(x)
        mesh = axes.pcolormesh(
            edges,
            np.arange(len(rows) + 1) - 0.5,
            values,
            vmin=low,
            vmax=high if high > low else low + 1,
            cmap="viridis",
            rasterized=True,  # 48 layers of 400 points would be 19,200 paths
        )
        every = math.ceil(len(rows) / 12)
        axes.set_yticks(range(0, len(rows), every), [str(n) for n in list(rows)[::every]])
        axes.set_ylabel("layer")
        bar = figure.colorbar(mesh, ax=axes, pad=0.02, aspect=14)
        bar.outline.set_visible(False)  # type: ignore[operator]
        bar.ax.tick_params(length=0)
        if percent:
            _as_percents(bar.ax)
        _count_x(axes, ends, x_name)
        svg, box = _svg(figure, axes)
    cells = [[None if math.isnan(v) else v for v in _short(row)] for row in values.tolist()]
    data = {**box, "xName": x_name, "percent": percent, "layers": list(rows), "x": _short(x)}
    each = max(line.each for line in rows.values())
    return Drawn(svg, {**data, "each": each, "cells": cells})


# -- how


def _style() -> Any:
    import matplotlib

    return matplotlib.rc_context(_RC)  # type: ignore[arg-type]


def _axes() -> tuple[Figure, Axes]:
    # Not pyplot: it keeps every figure, and may ask for a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72, layout="constrained")
    figure.patch.set_visible(False)
    axes = figure.subplots()
    axes.patch.set_visible(False)
    axes.tick_params(length=0)
    return figure, axes


def _trace(axes: Axes, trace: Trace) -> None:
    """One line and its band, each in an SVG group of its own, which the page can hide."""
    line, name = trace.line, f"g{trace.group}-"
    colour = f"#0102{_GROUP + trace.group % COLOURS:02x}"
    dashes = "--" if trace.limit or trace.group >= COLOURS else "-"
    # A line of one point is no line: points are marked where they are few.
    marker = "o" if len(line.x) <= 24 and not trace.limit else ""
    if line.low != line.high and not trace.limit:
        band = axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.16, linewidth=0)
        band.set_gid(f"{name}band")
    (drawn,) = axes.plot(
        line.x,
        line.mean,
        dashes,
        color=colour,
        linewidth=1.2 if trace.limit else 1.8,
        marker=marker,
        markersize=3.2,
    )
    drawn.set_gid(f"{name}limit" if trace.limit else f"{name}line")


def _count_x(axes: Axes, x: Sequence[float], name: str) -> None:
    """An x axis of whole numbers, a little wider than the values."""
    from matplotlib.ticker import MaxNLocator

    room = 0.015 * (max(x) - min(x)) or 0.5  # a mark at the edge is not cut
    axes.set_xlim(min(x) - room, max(x) + room)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel(name)


def _as_logarithms(axes: Axes, least: float, zeros: bool) -> None:
    """A logarithmic y axis; with zeros it is linear from 0 to the least value above 0."""
    from matplotlib.ticker import FuncFormatter

    if zeros:
        axes.set_yscale("symlog", linthresh=least)
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
    # Not 10 with a small exponent: a browser has no font for matplotlib's formulas.
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))


def _as_percents(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g} %"))


def edges_of(x: Sequence[float]) -> list[float]:
    """Where the cells around the points end: half way to the next point."""
    half = [(a + b) / 2 for a, b in pairwise(x)]
    first = x[0] - (half[0] - x[0] if half else 0.5)
    last = x[-1] + (x[-1] - half[-1] if half else 0.5)
    return [first, *half, last]


def _short(values: Sequence[float]) -> list[float]:
    """Six digits are more than a reader can see."""
    return [float(f"{value:.6g}") for value in values]


def _svg(figure: Figure, axes: Axes) -> tuple[str, dict[str, Any]]:
    """The SVG as a part of a page, and where in it the axes are.

    Returns:
        The text, and a dict of "box" (left, top, right, bottom in units of the SVG) and "limits"
        (the values of x at left and right).
    """
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", metadata=nothing)
    box = axes.get_window_extent()
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # report.css has these rules
    svg = re.sub(
        r"<svg[^>]*>", f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true">', svg, count=1
    )
    svg = re.sub(r'id="(g\d+)-(\w+)"', r'class="\1 \2"', svg)
    svg = re.sub(r"#0102([0-9a-f]{2})", _variable, svg)
    edges = (box.x0, HEIGHT - box.y1, box.x1, HEIGHT - box.y0)
    limits = _short(axes.get_xlim())
    return svg, {"box": [round(float(edge), 1) for edge in edges], "limits": limits}


def _variable(match: re.Match[str]) -> str:
    """The CSS variable of a colour that stands for something."""
    code = int(match[1], 16)
    if code >= _STAGE:
        return f"var(--s{code - _STAGE})"
    if code >= _GROUP:
        return f"var(--g{code - _GROUP})"
    return "var(--grid)" if code == _GRID else "var(--ink)"
