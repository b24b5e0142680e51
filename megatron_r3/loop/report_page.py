"""The page of `megatron-r3 rl report`: one HTML file that needs nothing else.

report.html is its template. Jinja escapes every text that is put in. Styles, scripts and plotly.js
(5 MB, so that the page can be sent as one file) are inside, and a content security policy forbids
the browser to load anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from megatron_r3.loop import report_charts as charts
from megatron_r3.loop import report_numbers as numbers
from megatron_r3.loop import report_tables as tables
from megatron_r3.loop.report import Run
from megatron_r3.loop.report_contents import PARTS, ROUTERS, WELL
from megatron_r3.loop.report_samples import samples
from megatron_r3.replay.words import one_line

try:
    from plotly.offline import get_plotlyjs
except ModuleNotFoundError as missing:
    raise ValueError("rl report takes plotly: pip install 'megatron-r3[report]'") from missing


def page(runs: Sequence[Run]) -> str:
    """The whole page, for runs in the order in which they shall be shown.

    Raises:
        ValueError: a run's config.toml, or its policy's config.json, is not what it must be.
    """
    groups = numbers.groups_of(runs)
    parts = {
        question: [card for chart in members if (card := charts.lines(chart, groups))]
        for question, members in PARTS.items()
    }
    parts[ROUTERS] += charts.mismatch_maps(groups) + charts.load_maps(groups)
    parts[WELL] += charts.stacks(groups)
    warnings, notes = tables.remarks(groups)
    pushed = sum(len(run.of("pushed")) for run in runs)
    every = f"All {pushed} pushes that are recorded were verified"
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,  # a name that is not given here is an error
        finalize=_one_line,
    )
    # a browser reads no JSON with NaN in it, and would show a page without charts
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    template = environment.get_template("report.html")
    return template.render(
        groups=groups,
        names=", ".join(group.name for group in groups),
        now=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        seeds=len(runs) > len(groups),
        warnings=warnings,
        calm=every if pushed else "No push is recorded",
        notes=notes,
        facts=tables.facts(groups),
        glance=tables.glance(groups),
        parts=parts,
        figures=[card.figure for cards in parts.values() for card in cards],
        samples=samples(runs),
        pushes=[tables.pushes(run) for group in groups for run in group.runs],
        configs=_configs(runs),
        plotly=Markup(get_plotlyjs()),
    )


def _one_line(value: Any) -> Any:
    """What the template puts in: a text on one line, our own HTML and numbers as they are."""
    return value if not isinstance(value, str) or isinstance(value, Markup) else one_line(value)


def _configs(runs: Sequence[Run]) -> dict[str, Markup]:
    """The text of each config.toml by the name of the run."""
    files = {run.name: run.directory / "config.toml" for run in runs}
    return {
        name: escape(file.read_text(encoding="utf-8", errors="replace"))
        for name, file in files.items()
        if file.is_file()
    }
