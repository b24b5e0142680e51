"""The page of `megatron-r3 rl report`: one HTML file that needs nothing else.

report.html is the template, in which Jinja escapes every text. Styles, script and plotly.js (5 MB)
are inside the page, so that it can be sent as one file. A content security policy forbids the
browser to load anything.

Shape suffixes (docs/glossary.md): N.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from megatron_r3.data.store import RolloutStore
from megatron_r3.loop.report import LAYER, Run
from megatron_r3.loop.report_charts import PARTS, by_layer, figures_of
from megatron_r3.replay.words import one_line

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs
except ModuleNotFoundError as missing:
    raise ValueError("rl report needs plotly: pip install 'megatron-r3[report]'") from missing

Row = list[str]
SHOWN = 4  # how many samples of a collection are shown, spread over its prompts
MOST = 400  # characters that are shown of a prompt, and of an answer


def page(runs: Sequence[Run]) -> str:
    """The whole page, for runs in the order in which they shall be shown."""
    parts = {
        question: [figure for chart in charts for figure in figures_of(chart, runs)]
        for question, charts in PARTS.items()
    }
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,  # a name that is not given below is an error
        # puts each text of a run on one line; Markup has another type and stays as it is
        finalize=lambda value: one_line(value) if type(value) is str else value,
    )
    # fail here if a value is NaN: a browser cannot parse it, and would show no charts
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return environment.get_template("report.html").render(
        runs=runs,
        now=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        warnings=[f"{run.name}: {text}" for run in runs for text in warnings_of(run)],
        notes=[f"{run.name}: {text}" for run in runs for text in run.notes],
        facts=[_facts_of(run) for run in runs],
        parts=parts,
        figures=[figure for figures in parts.values() for figure in figures],
        samples=[(run.name, *found) for run in runs if any(found := _samples(run))],
        configs={
            run.name: Markup.escape(file.read_text(encoding="utf-8", errors="replace"))
            for run in runs
            if (file := run.directory / "config.toml").is_file()
        },
        plotly=Markup(get_plotlyjs()),
    )


def warnings_of(run: Run) -> list[str]:
    """What is wrong in a run, one sentence each, the worst first."""
    found = [
        f"the push of version {event['version']} was not verified: |dlogp| is "
        f"{event.get('abs_dlogp', 'unknown')}, the limit is {event.get('limit', 'unknown')}"
        for event in run.of("pushed")
        if not event["verified"]
    ]
    for event in run.of("examined"):
        text = f"rollouts of version {event['version']} were not stored: "
        found += [text + alarm for alarm in event["alarms"]]
    verified = {event["version"] for event in run.of("pushed") if event["verified"]}
    if wrong := [event for event in run.of("collected") if event["version"] not in verified]:
        found.append(
            f"{len(wrong)} collections were sampled by a version without a verified push, first: "
            f"collection {wrong[0]['collection']} by version {wrong[0]['version']}"
        )
    # Only steps in which all routes were replayed from rollouts must dispatch them as recorded.
    replayed = run.metrics.get("update/routes from rollout", {})
    shares = run.metrics.get("routes dispatched as recorded", {})
    if steps := [step for step in shares if shares[step] < 1 and replayed.get(step) == 1]:
        found.append(
            f"routes dispatched as recorded is below 1 {_at(steps)}, with replay: stop, and run "
            "make fidelity MEGATRON=DIR"
        )
    bounded = run.metrics.get("bounded ratio", {})
    if steps := [step for step in bounded if bounded[step] > 0]:
        found.append(f"bounded ratio is above 0 {_at(steps)}")
    for layer, shares in by_layer(LAYER, run).items():
        if steps := [step for step in shares if shares[step] > 0.5]:
            found.append(
                f"router mismatch is above one half in layer {layer} {_at(steps)}: the engine "
                "computes another model, or its router is noisy on purpose"
            )
    deaths = Counter(event["part"] for event in run.of("died"))
    found += [f"the {part} died {count} times; see logs/" for part, count in deaths.items()]
    for event in run.of("failed"):
        found.append(f"collection {event['collection']} was begun anew: {event['reason']}")
    return found


def _at(steps: Sequence[float]) -> str:
    return f"in {len(steps)} steps, first in step {steps[0]}"


def _facts_of(run: Run) -> Row:
    """A row of the table "What ran"."""
    used = [
        words
        for name, words in (("rollout", "rollout (R3)"), ("old policy", "old policy (R2)"))
        if any(run.metrics.get(f"update/routes from {name}", {}).values())
    ]
    live = "the trainer chose its experts live" if run.steps else ""
    # by number, since a collection may have two events
    collected = {event["collection"]: event for event in run.of("collected")}.values()
    pushed = run.of("pushed")
    return [
        run.name,
        f"routes from {' and '.join(used)}" if used else live,
        ", ".join({event["device"]: 0 for event in run.of("published") if "device" in event}),
        f"{run.steps:,}",
        f"{sum(event['verified'] for event in pushed):,} of {len(pushed):,}",
        f"{len(collected):,}",
        f"{sum(event['rollouts'] for event in collected):,}",
        f"{sum(event['tokens'] for event in collected):,}",
    ]


def _samples(run: Run) -> tuple[str, list[Row]]:
    """The error if the rollouts cannot be read, or ""; and the rows of the table of samples.

    The rows are of the first and the last collection.
    """
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
                rows.append([str(collection), *texts, f"{rollout.reward:.3g}"])
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
