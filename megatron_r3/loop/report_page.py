"""The page of `megatron-r3 rl report`: one HTML file that needs nothing else.

Texts that a run wrote are escaped, styles and script are inside, and a content security policy
forbids the browser to load anything. Charts stand in report_charts.py, numbers in
report_numbers.py, and what a chart means to a reader in report_contents.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib.resources import files
from itertools import count
from pathlib import Path

from megatron_r3.loop import report_charts as charts
from megatron_r3.loop import report_numbers as numbers
from megatron_r3.loop.report import Run
from megatron_r3.loop.report_charts import Drawn, Trace
from megatron_r3.loop.report_contents import LOOP, PARTS, ROUTING, Chart
from megatron_r3.loop.report_numbers import Group, Line
from megatron_r3.loop.report_samples import samples
from megatron_r3.loop.report_tables import (
    config_text,
    escaped,
    facts,
    glance,
    heading,
    pushes,
    remarks,
)

INTRODUCTION = """
<p>In each round a <b>sampler</b> writes answers to prompts (<b>rollouts</b>), each answer gets a
reward, and a <b>trainer</b> learns from them and publishes the next <b>version</b> of the policy,
which is pushed into the sampler. Both compute the same model, but not bit for bit the same. In a
mixture-of-experts model a token may therefore be sent to other <b>experts</b> by one than by the
other. Replay (R3) makes the trainer use the sampler's experts. This page shows whether the policy
learns, how far the two agree, and whether the loop runs well.</p>
"""


def page(runs: Sequence[Run]) -> str:
    """The whole page, for runs in the order in which they shall be shown."""
    groups = numbers.groups_of(runs)
    number = count()
    data: list[dict[str, object]] = []

    def figure(title: str, text: str, drawn: Drawn, of: str = "") -> str:
        """A chart with its words. Its ids get its number, since all charts share one page.

        Args:
            of: the class of the one group that the chart shows, with which it is hidden.
        """
        chart = next(number)
        data.append(drawn.data)
        svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\1c{chart}-", drawn.svg)
        return (
            f'<figure class="{of}" data-chart="{chart}"><figcaption><h3>{title}</h3>'
            f"<p>{text}</p></figcaption>{svg}{_stages_of(drawn)}</figure>"
        )

    parts = []
    for question, members in PARTS:
        shown = [
            figure(chart.title, *drawn) for chart in members if (drawn := _lines(chart, groups))
        ]
        if members is ROUTING:
            shown += [figure(*map_) for map_ in _maps(groups)]
        if members is LOOP:
            shown += [figure(*stack) for stack in _stacks(groups)]
        empty = "<p>Nothing of this was recorded.</p>"
        inside = f'<div class="charts">{"".join(shown)}</div>' if shown else empty
        parts.append(f"<section><h2>{question}</h2>{inside}</section>")
    return _document(groups, "".join(parts), data)


def write_page(text: str, out: Path) -> None:
    """Write a page whole or not at all: a page that is there stays until the new one is complete.

    Raises:
        OSError: the directory is not there, or cannot be written; it names the page.
    """
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(out)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(out)) from error
    finally:
        with suppress(OSError):
            part.unlink()


def _document(groups: Sequence[Group], parts: str, data: list[dict[str, object]]) -> str:
    names = ", ".join(group.name for group in groups)
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    here = files("megatron_r3.loop")
    style = (here / "report.css").read_text(encoding="utf-8")
    script = (here / "report.js").read_text(encoding="utf-8")
    # Inside of a script element `</script>` would end it, and nothing is escaped: < is \u003c.
    safe = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>RL run: {escaped(names)}</title><style>{style}</style></head><body>
<header><h1>RL run: {escaped(names)}</h1>{INTRODUCTION}
<p class="soft">Made by megatron-r3 rl report on {now}. {_how_to_read(groups)}</p></header>
{_legend(groups)}<main>{remarks(groups)}
<div class="beside"><section><h2>What ran</h2>{facts(groups)}</section>
<section><h2>At a glance</h2>{glance(groups)}</section></div>
{parts}
{samples(groups)}
<section><h2>Versions and pushes</h2>{pushes(groups)}</section>
{config_text(groups)}</main>
<script type="application/json" id="data">{safe}</script><script>{script}</script>
</body></html>
"""


def _how_to_read(groups: Sequence[Group]) -> str:
    text = "Point at a chart to read its values."
    if any(len(group.runs) > 1 for group in groups):
        text += (
            " Runs whose names differ in the number at the end are seeds of one experiment: a line "
            "is their mean, a band goes from the smallest to the largest of them."
        )
    return text


def _legend(groups: Sequence[Group]) -> str:
    """The names of the lines, which can be switched off; nothing for a single one."""
    if len(groups) == 1:
        return ""
    items = "".join(
        f'<label><input type="checkbox" checked data-group="{number}">'
        f'<i class="swatch{" dashed" if number >= charts.COLOURS else ""}" '
        f'style="--c:var(--g{number % charts.COLOURS})"></i>{escaped(group.label)}</label>'
        for number, group in enumerate(groups)
    )
    return f'<nav aria-label="runs">{items}</nav>'


def _lines(chart: Chart, groups: Sequence[Group]) -> tuple[str, Drawn] | None:
    """The words and the drawing of a chart; None if no run has its values."""
    traces = []
    for number, group in enumerate(groups):
        if line := numbers.line_of([chart.curve(run) for run in group.runs]):
            traces.append(Trace(number, group.name, line))
        if chart.limit and (line := numbers.line_of([chart.limit(run) for run in group.runs])):
            name = f"{group.name}, {chart.limit_name}"
            traces.append(Trace(number, name, line, limit=True))
    if not traces:
        return None
    runs = [run for group in groups for run in group.runs]
    said: dict[str, list[str]] = {}  # by what is said the runs of which it is said
    for of in chart.more:
        for run in runs:
            if words := of(run):
                said.setdefault(words, []).append(run.name)
    more = [
        escaped(words if len(names) == len(runs) else f"{', '.join(names)}: {words}", 1000)
        for words, names in said.items()
    ]
    text, each = " ".join([chart.text, *more]), max(t.line.each for t in traces)
    if each > 1:
        text += f" Each point is a mean over up to {each} neighbouring {chart.x}s."
    return text, charts.lines(traces, chart.x, chart.percent, chart.from_zero, chart.log)


def _maps(groups: Sequence[Group]) -> list[tuple[str, str, Drawn, str]]:
    """Mismatch and load by layer, one map for each group, all of one kind with the same colours."""
    kinds = (
        (
            "Router mismatch by layer",
            "Upwards the layer, to the right the step; yellow is the most. Healthy: somewhat more "
            "in deep layers; no layer stands out, and nothing jumps at a step.",
            numbers.mismatch_by_layer,
            ("step", 0.0, True),
        ),
        (
            "Busiest expert by layer",
            "Its tokens divided by the mean over experts; 1 is an even load. Healthy: no layer "
            "drifts to yellow. Layers are counted from 1 among the MoE layers.",
            numbers.load_by_layer,
            ("collection", 1.0, False),
        ),
    )
    shown = []
    for title, text, by_layer, (x, lowest, percent) in kinds:
        maps = []
        for number, group in enumerate(groups):
            of_runs = [by_layer(run) for run in group.runs]
            layers = sorted({layer for run in of_runs for layer in run})
            lines = {
                layer: line
                for layer in layers
                if (line := numbers.line_of([run.get(layer, {}) for run in of_runs]))
            }
            maps += [(number, lines)] if lines else []
        rows = [line for _, lines in maps for line in lines.values()]
        edges = [edge for line in rows for edge in charts.edges_of(line.x)]
        ends = (min(edges, default=0.0), max(edges, default=0.0))
        highest = max((value for line in rows for value in line.mean), default=0.0)
        if x == "step" and (each := max(r.steps_each for g in groups for r in g.runs)) > 1:
            text += f" The trainer moves away within the {each} steps on a collection: stripes."
        for number, lines in maps:
            drawn = charts.heat(lines, x, ends, (lowest, highest), percent)
            shown.append((_titled(title, number, groups), text, drawn, f"g{number}"))
    return shown


def _stacks(groups: Sequence[Group]) -> list[tuple[str, str, Drawn, str]]:
    """Times by stage of each collection, one chart for each group, all with the same axes."""
    text = (
        "Seconds of each collection by stage; sampling is the collector's own work, and it waits "
        "while the trainer trains. Healthy: little of the rest, and no growth."
    )
    stacks: list[tuple[int, dict[str, Line]]] = []
    for number, group in enumerate(groups):
        of_runs = [numbers.stage_times(run) for run in group.runs]
        lines = {
            stage: line
            for stage in numbers.STAGES
            if (line := numbers.line_of([times.get(stage, {}) for times in of_runs]))
        }
        stacks += [(number, lines)] if lines else []
    sums = [[sum(s) for s in zip(*(x.mean for x in p.values()), strict=True)] for _, p in stacks]
    longest = [line.x for _, parts in stacks for line in parts.values()]
    return [
        (
            _titled("Where the time goes", number, groups),
            text,
            charts.stacked(
                lines,
                "collection",
                (min(x[0] for x in longest), max(x[-1] for x in longest)),
                max(map(max, sums)),
            ),
            f"g{number}",
        )
        for number, lines in stacks
    ]


def _stages_of(drawn: Drawn) -> str:
    """The names of the stages that a chart shows, with their colours; nothing for another chart."""
    items = "".join(
        f'<span><i class="swatch" style="--c:var(--s{line["stage"]})"></i>{line["name"]}</span>'
        for line in drawn.data.get("lines", ())
        if "stage" in line
    )
    return f'<p class="stages">{items}</p>' if items else ""


def _titled(title: str, number: int, groups: Sequence[Group]) -> str:
    """The title of a chart of one group, with its name where there are several."""
    return title if len(groups) == 1 else f"{title}: {heading(number, groups)}"
