"""The tables of a report: what ran, first against last, pushes, and what a reader must not miss."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from statistics import fmean

from megatron_r3.loop import report_numbers as numbers
from megatron_r3.loop.report import SECONDS, Curve, Event, Run
from megatron_r3.loop.report_facts import OPTIONS
from megatron_r3.loop.report_numbers import Group, metric, of_events
from megatron_r3.replay.words import one_line

NOT_RECORDED = '<span class="soft">not recorded</span>'
K3 = metric("update/sampler k3 kl")
GLANCE: tuple[tuple[str, Callable[[Run], Curve], bool], ...] = (
    ("Reward", metric("update/reward mean"), False),
    ("KL from sampler to trainer (k3)", K3, False),
    ("k3, first step of each collection", numbers.first_steps(K3), False),
    ("Learning rate", metric("update/learning rate"), False),
    ("Gradient norm", metric("update/gradient norm"), False),
    ("Loss", metric("update/loss"), False),
    ("Extreme tokens, F(2)", metric("update/sampler extreme"), True),
    ("Router mismatch", metric("router mismatch"), True),
    ("Token mismatch", metric("token mismatch"), True),
    ("Routes dispatched as recorded", metric("routes dispatched as recorded"), True),
    ("Entropy", metric("update/entropy"), False),
    ("Response length", metric("update/response length"), False),
    ("Load of the busiest expert", of_events("collected", "collection", "expert_load", max), False),
    ("Seconds of a collection", numbers.seconds_of_collections, False),
    ("Seconds of a step", metric(SECONDS), False),
    ("Tokens a second", numbers.tokens_a_second, False),
)


def escaped(text: str, most: int = 200) -> str:
    """A text that a run wrote, as one line for the page."""
    return html.escape(one_line(text, most))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table of cells that are HTML; the first cell of each row is its heading.

    A row of one cell more says the same of all columns: ["device", "cpu"] below ["", "live", "r3"].
    """
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = ""
    for name, *cells in rows:
        span = f' colspan="{len(head) - 1}"' if len(cells) == 1 < len(head) - 1 else ""
        inside = "".join(f"<td{span}>{cell}</td>" for cell in cells)
        body += f'<tr><th scope="row">{name}</th>{inside}</tr>'
    # tabindex: who has no mouse must be able to scroll a table that is too wide
    return (
        f'<div class="scroll {kind}" tabindex="0"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


# -- what ran


def facts(groups: Sequence[Group]) -> str:
    """Model, layout, sampler, sizes and times, a column for each group."""
    counts: tuple[tuple[str, Callable[[Run], float | None], Callable[[float], str]], ...] = (
        ("steps", lambda run: run.steps, _whole),
        ("policy versions", lambda run: len(_numbers(run, "published", "version")), _whole),
        ("collections", lambda run: len(_numbers(run, "collected", "collection")), _whole),
        ("rollouts", lambda run: _total(run, "rollouts"), _whole),
        ("tokens", lambda run: _total(run, "tokens"), _whole),
        ("wall time", numbers.wall_seconds, duration),
    )
    rows = [
        [name, *(_texts([r.facts[name] for r in g.runs if name in r.facts]) for g in groups)]
        for name in ("model", "layout", "sampler", "loop", OPTIONS)
    ]
    rows += [
        ["replay", *(_texts([w for r in g.runs if (w := numbers.replay_of(r))]) for g in groups)]
    ]
    rows += [["device", *(_texts([d for r in g.runs for d in _devices(r)]) for g in groups)]]
    rows += [
        [name, *(_from_to([value(run) for run in group.runs], words) for group in groups)]
        for name, value, words in counts
    ]
    if any(len(group.runs) > 1 for group in groups):
        runs = ["runs", *(escaped(", ".join(r.name for r in g.runs), 2000) for g in groups)]
        rows.insert(0, runs)
    rows = [row[:2] if len(set(row[1:])) == 1 else row for row in rows]
    return table(["", *(heading(n, groups) for n in range(len(groups)))], rows)


def heading(number: int, groups: Sequence[Group]) -> str:
    """The name of a group with the colour of its lines, which a single group does not need."""
    label = escaped(groups[number].label)
    if len(groups) == 1:
        return label
    return f'<span class="name" style="--c:var(--g{number % 8})">{label}</span>'


def _devices(run: Run) -> list[str]:
    return [event["device"] for event in run.of("published") if "device" in event]


def _numbers(run: Run, kind: str, name: str) -> set[int]:
    return {event[name] for event in run.of(kind)}


def _total(run: Run, name: str) -> float | None:
    """The sum over collections; a collection that came twice counts once."""
    last = {event["collection"]: event[name] for event in run.of("collected")}
    return sum(last.values()) if last else None


def _texts(texts: Sequence[str]) -> str:
    return "<br>".join(escaped(text) for text in dict.fromkeys(texts)) or NOT_RECORDED


def _from_to(values: Sequence[float | None], words: Callable[[float], str]) -> str:
    """One value for all runs of a group, or the smallest and the largest."""
    there = [value for value in values if value is not None]
    if not there:
        return NOT_RECORDED
    ends = dict.fromkeys(words(value) for value in (min(there), max(there)))
    return " to ".join(ends) + (" each" if len(values) > 1 else "")


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Seconds in words: 9 ms, 12.3 s, 4 min 5 s, 3 h 12 min."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s"


# -- first against last


def glance(groups: Sequence[Group]) -> str:
    """The mean of the first and of the last third of each curve."""
    rows = []
    for name, curve, percent in GLANCE:
        ends = [[e for run in g.runs if (e := numbers.thirds(curve(run)))] for g in groups]
        if any(ends):
            rows.append([name, *(_first_to_last(of_runs, percent) for of_runs in ends)])
    if not rows:
        return "<p>No numbers were recorded.</p>"
    several = any(len(group.runs) > 1 for group in groups)
    falls = dict.fromkeys(
        text.replace("this", "k3 and the mismatch")
        for group in groups
        for run in group.runs
        if (text := numbers.learning_rate(run))
    )
    seeds = (
        "; in brackets the smallest and the largest of the seeds' last thirds" if several else ""
    )
    return (
        f'<p class="soft">Mean of the first third of the run → mean of the last third{seeds}.'
        f"{' '.join(['', *falls])}</p>"
        + table(["", *(heading(n, groups) for n in range(len(groups)))], rows, "numbers")
    )


def _first_to_last(ends: Sequence[tuple[float, float]], percent: bool) -> str:
    if not ends:
        return NOT_RECORDED
    first, last = (fmean(values) for values in zip(*ends, strict=True))
    text = f"{number(first, percent)} → <b>{number(last, percent)}</b>"
    if len(ends) > 1:
        lasts = [last for _, last in ends]
        low, high = number(min(lasts), percent), number(max(lasts), percent)
        text += f' <span class="soft">({low} to {high})</span>'
    return text


def number(value: float, percent: bool = False) -> str:
    """Three digits, as 0.00412, 12.3, 1,234 or 1.23e-07; of a share near 1 more, as 99.996 %."""
    if percent:
        short = f"{100 * value:.3g}"
        # A share that is not 1 is not shown as 100 %.
        return f"{100 * value:.6g} %" if short == "100" and value != 1 else f"{short} %"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


# -- versions and pushes


def pushes(groups: Sequence[Group]) -> str:
    """What became of each version, a table for each run."""
    runs = [run for group in groups for run in group.runs]
    parts = []
    for run in runs:
        pushed, lives = run.of("pushed"), run.of("started", "died", "ended")
        start = min((event["time"] for event in run.events), default=0.0)
        good = sum(event["verified"] for event in pushed)
        what = f"{len(pushed)} pushes, {good} verified"
        what += f", <b>{len(pushed) - good} not</b>" if good < len(pushed) else ""
        body = _push_table(pushed, start) if pushed else "<p>No push was recorded.</p>"
        body += _life_table(lives, start) if lives else ""
        unfold = " open" if len(runs) == 1 or good < len(pushed) else ""
        parts.append(
            f"<details{unfold}><summary>{escaped(run.name)}: {what}</summary>{body}</details>"
        )
    return (
        '<p class="soft">A push has the sampler take a version. Before the sampler may write a '
        "rollout with it, the log-probs and experts of fixed tokens are compared with the "
        "trainer's own. The column cache says how far answers change where the sampler may use "
        "keys and values that it kept: 0 if it forgot those of older weights.</p>" + "".join(parts)
    )


def _push_table(pushed: Sequence[Event], start: float) -> str:
    head = [
        "version",
        "after",
        "how",
        "took",
        "|dlogp|",
        "limit",
        "cache",
        "routes that agree",
        "verified",
    ]
    rows = []
    for event in pushed:
        agree = event.get("route_agreement") or []
        rows.append(
            [
                str(event["version"]),
                duration(event["time"] - start),
                escaped(event.get("how", ""), 60),
                duration(event["seconds"]) if "seconds" in event else "",
                number(event["abs_dlogp"]) if "abs_dlogp" in event else "",
                number(event["limit"]) if "limit" in event else "",
                number(event["cached_dlogp"]) if "cached_dlogp" in event else "",
                f"{number(min(agree), True)} to {number(max(agree), True)}" if agree else "",
                '<span class="good">✓ yes</span>'
                if event["verified"]
                else '<span class="bad">✗ no</span>',
            ]
        )
    return table(head, rows, "numbers tall")


def _life_table(lives: Sequence[Event], start: float) -> str:
    rows = [
        [
            duration(event["time"] - start),
            escaped(event["part"], 60),
            f'<span class="bad">{event["event"]}</span>'
            if event["event"] == "died"
            else event["event"],
            str(event.get("status", "")),
        ]
        for event in lives
    ]
    return "<h3>Processes</h3>" + table(["after", "part", "event", "exit status"], rows, "tall")


def config_text(groups: Sequence[Group]) -> str:
    """The config of each run, as it is; nothing if no run has one."""
    runs = [run for group in groups for run in group.runs if run.config]
    if not runs:
        return ""
    parts = "".join(
        f"<details><summary>{escaped(run.name)}</summary><pre>{html.escape(run.config)}</pre>"
        "</details>"
        for run in runs
    )
    return f"<section><h2>config.toml</h2>{parts}</section>"


# -- what a reader must not miss


def remarks(groups: Sequence[Group]) -> str:
    """Warnings and notes of all runs; one sentence if there is no warning."""
    warnings, notes = [], []
    for group in groups:
        notes += [(group.name, text) for text in numbers.differences(group)]
        for run in group.runs:
            warnings += [(run.name, text) for text in numbers.warnings_of(run)]
            notes += [(run.name, text) for text in numbers.notes_of(run)]
    several = sum(len(group.runs) for group in groups) > 1

    def listed(items: Sequence[tuple[str, str]]) -> str:
        texts = [f"{name}: {text}" if several else text for name, text in items]
        return "<ul>" + "".join(f"<li>{escaped(text, 1000)}</li>" for text in texts) + "</ul>"

    shown = (
        f'<section class="box wrong"><h2>Look at this first</h2>{listed(warnings)}</section>'
        if warnings
        else f'<section class="box fine"><h2>Nothing alarming</h2><p>{_calm(groups)}</p></section>'
    )
    if notes:
        shown += f'<section class="box"><h2>Notes</h2>{listed(notes)}</section>'
    return shown


def _calm(groups: Sequence[Group]) -> str:
    """What was looked at, where nothing was found."""
    pushed = sum(len(run.of("pushed")) for group in groups for run in group.runs)
    checked = (
        f"All {pushed} pushes that are recorded were verified"
        if pushed
        else ("No push is recorded")
    )
    return f"{checked}, no part died, and no value is outside of what it must be."
