"""The tables of a report, as rows of texts that its template escapes; its warnings and notes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from markupsafe import Markup

from megatron_r3.data.untrusted import read_json
from megatron_r3.loop import report_numbers as numbers
from megatron_r3.loop.config import parse_config
from megatron_r3.loop.report import Curve, Event, Run
from megatron_r3.loop.report_contents import AGREEMENT, GLANCE, PARTS, PERCENT
from megatron_r3.loop.report_numbers import Group, duration, number
from megatron_r3.replay.words import one_line, quoted

# HTML of our own; all other texts are escaped where they are put into HTML.
NOT_RECORDED = Markup('<span class="soft">not recorded</span>')
GOOD, BAD = Markup('<span class="good">{}</span>'), Markup('<span class="bad">{}</span>')
Row = Sequence[str]
# Megatron's options of the layout, as people write them short
_LAYOUT = {
    "--tensor-model-parallel-size": "TP",
    "--pipeline-model-parallel-size": "PP",
    "--context-parallel-size": "CP",
    "--expert-model-parallel-size": "EP",
    "--expert-tensor-parallel-size": "ETP",
}
# an option with its value: "--lr 4e-4", but not --lr-decay-style
_OPTIONS = re.compile(
    r"--(?:no-)?(?:moe-router-replay[\w-]*|rollouts[\w-]*|(?:lr|bf16|fp16)(?![\w-]))"
    r"(?:[ =][^-\s]\S*)?"
)


# -- what ran


def facts(groups: Sequence[Group]) -> list[Row]:
    """Model, layout, sampler, sizes and times: a name, and a cell for each group.

    A row with one cell says the same of all groups.

    Raises:
        ValueError: a config.toml is no config of a run, or a config.json is not JSON.
    """
    texts = {run.name: _texts(run) for group in groups for run in group.runs}
    numbers_of = {run.name: _counts(run) for group in groups for run in group.runs}
    several = any(len(group.runs) > 1 for group in groups)
    rows: list[Row] = [["runs", *(", ".join(r.name for r in g.runs) for g in groups)]] * several
    for name in ("model", "layout", "sampler", "loop", "training options", "replay", "device"):
        rows.append(
            [name, *(_joined([texts[run.name].get(name, "") for run in g.runs]) for g in groups)]
        )
    for name in ("steps", "policy versions", "collections", "rollouts", "tokens", "wall time"):
        words = duration if name == "wall time" else "{:,}".format
        rows.append(
            [name, *(_from_to([numbers_of[r.name][name] for r in g.runs], words) for g in groups)]
        )
    return [row[:2] if len(set(row[1:])) == 1 else row for row in rows]


def _texts(run: Run) -> dict[str, str]:
    """What a run was, in words, as far as its config, its newest policy and its events tell."""
    devices = [event["device"] for event in run.of("published") if "device" in event]
    texts = {
        "model": _model(run.directory),
        "replay": numbers.replay_of(run),
        "device": ", ".join(dict.fromkeys(devices)),
    }
    file = run.directory / "config.toml"
    if not file.is_file():
        return texts
    config = parse_config(file)
    trainer, sampler = config.trainer, config.sampler
    options = " ".join(trainer.arguments)
    processes = f"{trainer.processes} {'process' if trainer.processes == 1 else 'processes'}"
    sizes = [
        f"{short}{found[1]}"
        for name, short in _LAYOUT.items()
        if (found := re.search(rf"{name}[ =](\d+)", options))
    ]
    worse = ", ".join(f"{name} {value}" for name, value in config.degrade if value)
    return texts | {
        "layout": ", ".join(
            ["processes of a command of its own" if trainer.launch else processes, *sizes]
        ),
        "sampler": sampler.engine
        + (" (transformers)" if sampler.engine == "embedded" else "")
        + (", new weights in place" if sampler.in_place else ", started anew for new weights")
        + (f", made worse on purpose: {worse}" if worse else ""),
        "loop": f"{trainer.steps} {'step' if trainer.steps == 1 else 'steps'} on a collection, "
        f"lag {config.run.lag}",
        "training options": " ".join(_OPTIONS.findall(options)),
    }


def _model(directory: Path) -> str:
    """The model of the newest policy, from its config.json; empty if no policy is there."""
    configs = sorted(directory.glob("policies/v[0-9]*[0-9]/config.json"))
    if not configs:
        return ""
    config = read_json(configs[-1].read_bytes(), str(configs[-1]))
    if not isinstance(config, dict):
        raise ValueError(f"{configs[-1]}: expected a JSON object, got {quoted(config)}")

    def first(*names: str) -> str:
        return next((str(config[name]) for name in names if config.get(name) is not None), "?")

    experts = first("num_experts", "num_local_experts", "n_routed_experts")
    return (
        f"{first('model_type')}, {first('num_hidden_layers')} layers, hidden size "
        f"{first('hidden_size')}, {experts} experts, top-{first('num_experts_per_tok')}"
    )


def _counts(run: Run) -> dict[str, float | None]:
    # a collection that came twice counts once
    collected = {event["collection"]: event for event in run.of("collected")}.values()
    return {
        "steps": run.steps,
        "policy versions": len({event["version"] for event in run.of("published")}),
        "collections": len(collected),
        "rollouts": sum(event["rollouts"] for event in collected) or None,
        "tokens": sum(event["tokens"] for event in collected) or None,
        "wall time": numbers.wall_seconds(run),
    }


def _joined(texts: Sequence[str]) -> str:
    words = (one_line(text, 200) for text in dict.fromkeys(texts) if text)
    return Markup("<br>").join(words) or NOT_RECORDED


def _from_to(values: Sequence[float | None], words: Callable[[float], str]) -> str:
    """One value for all runs of a group, or the smallest and the largest."""
    there = [value for value in values if value is not None]
    if not there:
        return NOT_RECORDED
    ends = dict.fromkeys(words(value) for value in (min(there), max(there)))
    return " to ".join(ends) + (" each" if len(values) > 1 else "")


# -- first against last


def glance(groups: Sequence[Group]) -> list[Row]:
    """The mean of the first and of the last third of each curve."""
    curves: dict[str, tuple[Callable[[Run], Curve], bool]] = {}
    for chart in (chart for charts in PARTS.values() for chart in charts if GLANCE in chart.look):
        curves[chart.title] = (chart.curve, PERCENT in chart.look)
        if chart is AGREEMENT[0]:
            firsts = numbers.first_steps(chart.curve)
            curves["k3, first step of each collection"] = (firsts, False)
    rows: list[Row] = []
    for name, (curve, percent) in curves.items():
        ends = [[e for run in g.runs if (e := numbers.thirds(curve(run)))] for g in groups]
        if any(ends):
            rows.append([name, *(_first_to_last(of_runs, percent) for of_runs in ends)])
    return rows


def _first_to_last(ends: Sequence[tuple[float, float]], percent: bool) -> str:
    if not ends:
        return NOT_RECORDED
    first, last = (number(fmean(values), percent) for values in zip(*ends, strict=True))
    text = Markup("{} → <b>{}</b>").format(first, last)
    if len(ends) > 1:
        low, high = (number(end(last for _, last in ends), percent) for end in (min, max))
        text += Markup(' <span class="soft">({} to {})</span>').format(low, high)
    return text


# -- versions and pushes


@dataclass(frozen=True)
class Pushes:
    """What became of each version of a run, and of its processes."""

    name: str
    summary: str
    all_verified: bool
    pushed: list[Row]
    processes: list[Row]


def pushes(run: Run) -> Pushes:
    """The rows of the section "Versions and pushes"."""
    start = min((event["time"] for event in run.events), default=0.0)
    pushed = run.of("pushed")
    good = sum(event["verified"] for event in pushed)
    bad = Markup(", <b>{} not</b>").format(len(pushed) - good) if good < len(pushed) else ""
    return Pushes(
        run.name,
        f"{len(pushed)} pushes, {good} verified" + bad,
        good == len(pushed),
        [_push(event, start) for event in pushed],
        [
            [
                duration(event["time"] - start),
                event["part"],
                BAD.format("died") if event["event"] == "died" else event["event"],
                str(event.get("status", "")),
            ]
            for event in run.of("started", "died", "ended")
        ],
    )


def _push(event: Event, start: float) -> Row:
    agree = event.get("route_agreement")
    return [
        str(event["version"]),
        duration(event["time"] - start),
        event.get("how", ""),
        duration(event["seconds"]) if "seconds" in event else "",
        *(number(event[n]) if n in event else "" for n in ("abs_dlogp", "limit", "cached_dlogp")),
        f"{number(min(agree), True)} to {number(max(agree), True)}" if agree else "",
        GOOD.format("✓ yes") if event["verified"] else BAD.format("✗ no"),
    ]


# -- what a reader must not miss


def remarks(groups: Sequence[Group]) -> tuple[list[str], list[str]]:
    """The warnings and the notes of all runs; each names its run where there are several."""
    warnings, notes = [], []
    for group in groups:
        for run in group.runs:
            warnings += [(run.name, text) for text in numbers.warnings_of(run)]
            notes += [(run.name, text) for text in numbers.notes_of(run)]
    several = sum(len(group.runs) for group in groups) > 1
    return (
        [f"{name}: {text}" if several else text for name, text in warnings],
        [f"{name}: {text}" if several else text for name, text in notes],
    )
