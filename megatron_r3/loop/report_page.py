"""The page of `megatron-r3 rl report`: one HTML file that needs nothing else.

report.html is the template, in which Jinja escapes every text. Styles, scripts and plotly.js (5 MB)
are inside the page, so that it can be sent as one file. A content security policy forbids the
browser to load anything.

Shape suffixes (docs/glossary.md): N.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megatron_r3.data.store import RolloutStore
from megatron_r3.data.untrusted import read_json
from megatron_r3.loop import report_numbers as numbers
from megatron_r3.loop.config import parse_config
from megatron_r3.loop.report import Curve, Run
from megatron_r3.loop.report_charts import figures_of
from megatron_r3.loop.report_contents import GLANCE, PARTS, PERCENT
from megatron_r3.loop.report_numbers import Groups, duration, number
from megatron_r3.replay.words import one_line, quoted

try:
    from plotly.offline import get_plotlyjs
except ModuleNotFoundError as missing:
    raise ValueError("rl report needs plotly: pip install 'megatron-r3[report]'") from missing

# Markup is our own HTML, which Jinja does not escape.
NOT_RECORDED = Markup('<span class="soft">not recorded</span>')
Row = list[str]
SHOWN = 4  # how many samples of a collection are shown, spread over its prompts
MOST = 400  # characters that are shown of a prompt, and of an answer
# an option with its value: "--lr 4e-4", but not --lr-decay-style
_OPTIONS = re.compile(
    r"--(?:no-)?(?:moe-router-replay[\w-]*|rollouts[\w-]*|(?:lr|bf16|fp16)(?![\w-]))"
    r"(?:[ =][^-\s]\S*)?"
)
# an option of the layout, shown as is usual by its initials and a P: TP, ETP
_LAYOUT = re.compile(r"--([a-z-]+?)(?:-model)?-parallel-size[ =](\d+)")


def page(runs: Sequence[Run]) -> str:
    """The whole page, for runs in the order in which they shall be shown.

    Raises:
        ValueError: a run's config.toml, or its policy's config.json, is invalid.
    """
    groups = numbers.groups_of(runs)
    ordered = [run for group in groups.values() for run in group]
    parts = {
        question: [figure for chart in charts for figure in figures_of(chart, groups)]
        for question, charts in PARTS.items()
    }
    template = _environment().get_template("report.html")
    return template.render(
        groups=groups,
        runs=ordered,
        now=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        warnings=[(run.name, text) for run in ordered for text in numbers.warnings_of(run)],
        notes=[(run.name, text) for run in ordered for text in numbers.notes_of(run)],
        facts=_facts(groups),
        glance=_glance(groups),
        parts=parts,
        figures=[figure for figures in parts.values() for figure in figures],
        pushed=sum(len(run.of("pushed")) for run in runs),
        samples=[(run.name, *found) for run in runs if any(found := _samples(run))],
        configs={
            run.name: Markup.escape(file.read_text(encoding="utf-8", errors="replace"))
            for run in runs
            if (file := run.directory / "config.toml").is_file()
        },
        plotly=Markup(get_plotlyjs()),
    )


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,  # a name that `page` does not give is an error
        # puts each text of a run on one line; Markup has another type and stays as it is
        finalize=lambda value: one_line(value) if type(value) is str else value,
    )
    # fail here if a value is NaN: a browser cannot parse it, and would show no charts
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    environment.filters |= {"number": number, "duration": duration}
    return environment


def _facts(groups: Groups) -> list[Row]:
    """The table "What ran": per row a name and a cell for each group, or one cell if all agree."""
    of_groups = [[_facts_of(run) for run in group] for group in groups.values()]
    names = [", ".join(run.name for run in group) for group in groups.values()]
    rows = [["runs", *names]] if names != [*groups] else []
    for name in of_groups[0][0]:
        cells = [_cell([facts[name] for facts in of_runs]) for of_runs in of_groups]
        rows.append([name, *(cells if len(set(cells)) > 1 else cells[:1])])
    return rows


def _facts_of(run: Run) -> dict[str, Any]:
    """The facts of a run, from its config, its newest policy and its events."""
    devices = [event["device"] for event in run.of("published") if "device" in event]
    # by number, since a collection may have two events
    collected = {event["collection"]: event for event in run.of("collected")}.values()
    return {
        "model": _model(run.directory),
        **_config_of(run.directory / "config.toml"),
        "replay": numbers.replay_of(run),
        "device": ", ".join(dict.fromkeys(devices)),
        "steps": run.steps,
        "policy versions": len({event["version"] for event in run.of("published")}),
        "collections": len(collected),
        "rollouts": sum(event["rollouts"] for event in collected) or None,
        "tokens": sum(event["tokens"] for event in collected) or None,
        "wall time": numbers.wall_seconds(run),
    }


def _model(directory: Path) -> str:
    """The model of the newest policy, from its config.json; empty if no policy is there."""
    file = max(directory.glob("policies/v[0-9]*[0-9]/config.json"), default=None)
    if file is None:
        return ""
    config = read_json(file.read_bytes(), str(file))
    if not isinstance(config, dict):
        raise ValueError(f"{file}: expected a JSON object, got {quoted(config)}")
    experts = "num_experts num_local_experts n_routed_experts"
    names = ("model_type", "num_hidden_layers", "hidden_size", experts, "num_experts_per_tok")
    found = ([str(config[n]) for n in of.split() if config.get(n) is not None] for of in names)
    form = "{}, {} layers, hidden size {}, {} experts, top-{}"
    return form.format(*(values[0] if values else "?" for values in found))


def _config_of(file: Path) -> dict[str, str]:
    """The facts that the config of a run tells; empty texts if there is no config."""
    if not file.is_file():
        return dict.fromkeys(("layout", "sampler", "loop", "training options"), "")
    config = parse_config(file)
    trainer, sampler = config.trainer, config.sampler
    options = " ".join(trainer.arguments)
    layout = [f"{trainer.processes} {'process' if trainer.processes == 1 else 'processes'}"]
    if trainer.launch:
        layout = ["processes of [trainer] launch"]
    for name, size in _LAYOUT.findall(options):
        layout.append("".join(word[0].upper() for word in name.split("-")) + f"P{size}")
    of_config: str = sampler.engine
    engine = ["embedded (transformers)" if of_config == "embedded" else of_config]
    engine.append("new weights in place" if sampler.in_place else "started anew for new weights")
    if worse := ", ".join(f"{name} {value}" for name, value in config.degrade if value):
        engine.append(f"made worse on purpose: {worse}")
    steps = f"{trainer.steps} {'step' if trainer.steps == 1 else 'steps'}"
    return {
        "layout": ", ".join(layout),
        "sampler": ", ".join(engine),
        "loop": f"{steps} on a collection, lag {config.run.lag}",
        "training options": " ".join(_OPTIONS.findall(options)),
    }


def _cell(values: Sequence[Any]) -> str:
    """A cell for a group: the different texts of its runs, or their smallest and largest number."""
    there = [value for value in values if value not in ("", None)]
    if not there:
        return NOT_RECORDED
    if isinstance(there[0], str):
        return Markup("<br>").join(one_line(text, 200) for text in dict.fromkeys(there))
    words = duration if isinstance(there[0], float) else "{:,}".format
    ends = dict.fromkeys(words(value) for value in (min(there), max(there)))
    return " to ".join(ends) + (" each" if len(values) > 1 else "")


def _glance(groups: Groups) -> list[Row]:
    """The table "At a glance": for each chart the means of its first and of its last third."""
    rows = []
    for chart in (chart for charts in PARTS.values() for chart in charts if GLANCE in chart.look):
        curves = [[numbers.curves_of(chart, run) for run in group] for group in groups.values()]
        names = {"": chart.title}
        if chart.source == "update/sampler k3 kl":
            names[", first steps"] = "k3, first step of each collection"
        for which, name in names.items():
            of_groups = [[of[which] for of in group if of.get(which)] for group in curves]
            if any(of_groups):
                rows.append([name, *(_change(of, PERCENT in chart.look) for of in of_groups)])
    return rows


def _change(curves: Sequence[Curve], percent: bool) -> str:
    """First and last third of a group's curves; with fewer than three points first and last."""
    if not curves:
        return NOT_RECORDED
    values = [[curve[x] for x in sorted(curve)] for curve in curves]
    first = fmean(fmean(of[: max(len(of) // 3, 1)]) for of in values)
    lasts = [fmean(of[-max(len(of) // 3, 1) :]) for of in values]
    form = "{} → <b>{}</b>"
    if len(lasts) > 1:
        form += ' <span class="soft">({} to {})</span>'
    shown = (number(value, percent) for value in (first, fmean(lasts), min(lasts), max(lasts)))
    return Markup(form).format(*shown)


def _samples(run: Run) -> tuple[str, list[Row]]:
    """An error if the rollouts cannot be read, and rows of the first and the last collection."""
    folder = run.directory / "rollouts"
    sizes = {event["collection"]: event["rollouts"] for event in run.of("collected")}
    if not sizes or not folder.is_dir():
        return "", []
    rows = []
    try:
        store, words = RolloutStore([folder], mixed_policies=True), _words(run.directory)
        for collection in sorted({0, max(sizes)} & sizes.keys()):
            size = sizes[collection]
            first = range(collection * size, (collection + 1) * size, max(size // SHOWN, 1))[:SHOWN]
            for rollout in map(store.rollout, (index for index in first if index < len(store))):
                tokens, start = rollout.tokens_N.tolist(), rollout.prompt_length
                texts = (one_line(words(ids), MOST) for ids in (tokens[:start], tokens[start:]))
                rows.append([str(collection), *texts, number(rollout.reward)])
    except (OSError, ValueError) as error:  # the page is useful without samples
        return str(error), []
    return "", rows


def _words(directory: Path) -> Callable[[list[int]], str]:
    """A function that shows tokens: as text if the policy has a tokenizer, else as ids."""
    file = max(directory.glob("policies/v[0-9]*[0-9]/tokenizer.json"), default=None)
    try:
        from tokenizers import Tokenizer
    except ImportError:
        file = None
    if file is None:
        return lambda ids: " ".join(map(str, ids))
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception for an invalid file
        raise ValueError(f"{file}: {error}") from error
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
