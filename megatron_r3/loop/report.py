"""Read what a run of the loop wrote about itself: its metrics and its events, checked.

A run directory is read while the run may still be writing, and its parts may have been killed. A
line that is cut off is then no mistake: it is left out, and a note says so. Any other line that is
not what it must be is refused, with the file and the number of the line. docs/report.md lists
files and fields.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_r3.data.untrusted import read_json
from megatron_r3.loop.report_facts import facts_of
from megatron_r3.replay.words import one_line, quoted

# A value by the number of its step, collection or version. All three count up.
Curve = dict[float, float]
Event = dict[str, Any]

PARTS = ("trainer", "collector", "supervisor")  # events/PART.jsonl
SECONDS = "update/seconds"  # another at each start, unlike all else of a step
LAYER = "router mismatch/layer "  # before Megatron's number of the layer, in metrics.jsonl


@dataclass(frozen=True)
class Run:
    """What one run directory says.

    Attributes:
        name: the directory's own name, or more of its path where two runs have one name.
        metrics: each name of metrics.jsonl, by step. A value that is not finite is left out.
        events: those of trainer, collector and supervisor, each in the order of its file.
        facts: model, layout, sampler and options in words, as far as they are known.
        config: the text of config.toml; empty if the run has none.
        saved: the steps after which a checkpoint was written, of those that are still there.
        notes: what was left out or came twice, for the reader of the report.
    """

    name: str
    directory: Path
    metrics: dict[str, Curve]
    events: list[Event]
    facts: dict[str, str] = field(default_factory=dict)
    config: str = ""
    notes: list[str] = field(default_factory=list)
    saved: tuple[int, ...] = ()

    def of(self, *kinds: str) -> list[Event]:
        """The events of these kinds, in order."""
        return [event for event in self.events if event["event"] in kinds]

    @property
    def steps(self) -> int:
        """How many steps of training metrics.jsonl has."""
        return len({step for curve in self.metrics.values() for step in curve})

    @property
    def steps_each(self) -> int:
        """Optimizer steps on a collection: mini-steps times epochs; 1 where nothing says it."""
        pairs = [(e.get("iteration", 0), e["version"]) for e in self.of("published")]
        return next((steps // version for steps, version in reversed(pairs) if version), 1) or 1

    @property
    def layers(self) -> list[int]:
        """Megatron's numbers of the layers whose mismatch was measured."""
        names = [name.removeprefix(LAYER) for name in self.metrics if name.startswith(LAYER)]
        return sorted(int(name) for name in names)


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Read each directory, and give each run a name of its own.

    Raises:
        ValueError: a directory is given twice, is no run, or has a line that is not what it must
            be; the error names file and line.
    """
    where = [directory.resolve() for directory in directories]
    twice = [path for path, count in Counter(where).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]} is given twice: name each run once")
    return [read_run(path, name) for path, name in zip(where, _names(where), strict=True)]


def read_run(directory: Path, name: str) -> Run:
    """Read one run directory.

    Raises:
        ValueError: as `read_runs`.
    """
    files = {part: directory / "events" / f"{part}.jsonl" for part in PARTS}
    log = directory / "metrics.jsonl"
    if not directory.is_dir():
        raise ValueError(f"{directory} is no directory: give the directory of a run")
    if not any(path.is_file() for path in (log, *files.values())):
        raise ValueError(
            f"{directory} has neither metrics.jsonl nor events/*.jsonl: give the directory of a run"
        )
    notes: list[str] = []
    metrics = _metrics(log, notes)
    events = [event for path in files.values() for event in _events(path, notes)]
    if not metrics:
        notes.append("metrics.jsonl has no step yet: curves by step are missing")
    facts = facts_of(directory)
    config = directory / "config.toml"
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    names = [one.name.removeprefix("iter_") for one in directory.glob("checkpoints/iter_*")]
    saved = tuple(sorted(int(name) for name in names if name.isascii() and name.isdigit()))
    return Run(name, directory, metrics, events, facts, text, notes, saved)


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ, all of one length.

    Example: noise/live-0 and fp8/live-0 keep both parts; a/live-0 and b/live-1 are live-0, live-1.
    """
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line's place and object. A missing file has none; a cut-off line is left out."""
    if not path.is_file():
        return
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        # After the line end of the last whole line comes nothing, or the beginning of a line.
        last = number == len(lines)
        if last and not line.strip():
            return
        where = f"{path}, line {number}"
        try:
            value = read_json(line, where)
        except ValueError:
            # A part that was killed while it wrote goes on in a new line: `{"time": 17` has no end.
            if not last and (not line.startswith(b"{") or line.endswith(b"}")):
                raise
            notes.append(
                f"{path.name}: line {number}{', the last one,' if last else ''} is cut off and was "
                "left out; the run was still writing it, or was killed while it wrote"
            )
            continue
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected a JSON object, got {quoted(value)}")
        yield where, value


# -- metrics.jsonl


def _metrics(path: Path, notes: list[str]) -> dict[str, Curve]:
    """Every name's values by step. Of a step that came twice the later line counts."""
    steps: dict[int, dict[str, float]] = {}
    again, differ, not_finite = [], [], Counter[str]()
    for where, line in _lines(path, notes):
        step = line.pop("iteration", None)
        if not _is_count(step):
            raise ValueError(f"{where}: expected a whole number as iteration, got {quoted(step)}")
        for name, value in line.items():
            if not _is_number(value):
                raise ValueError(
                    f"{where}: expected a number as {quoted(name)}, got {quoted(value)}"
                )
            if name.startswith(LAYER) and not _is_layer(name):
                raise ValueError(f"{where}: {quoted(name)} does not end in the number of a layer")
        not_finite.update(name for name, value in line.items() if not math.isfinite(value))
        if step in steps:
            again.append(step)
            # A value may be missing from one of the lines: it is measured every few steps only.
            both = (steps[step].keys() & line.keys()) - {SECONDS}
            differ += [step] if any(steps[step][name] != line[name] for name in both) else []
        steps[step] = line
    if again:
        what = f"in {len(differ)} of them with other values" if differ else "with equal values"
        notes.append(
            f"{len(again)} steps were logged twice ({min(again)} to {max(again)}), {what}: the "
            "trainer was started again; the later lines are shown"
        )
    for name, count in sorted(not_finite.items()):
        notes.append(f"{one_line(name, 100)} is not finite in {count} lines, which are left out")
    curves: dict[str, Curve] = {}
    for step, values in sorted(steps.items()):
        for name, value in values.items():
            if math.isfinite(value):
                curves.setdefault(name, {})[step] = value
    return curves


# -- events


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _is_layer(name: str) -> bool:
    number = name.removeprefix(LAYER)
    return number.isascii() and number.isdigit() and len(number) < 6


def _is_span(value: Any) -> bool:
    return _is_number(value) and value >= 0 and math.isfinite(value)


Kind = tuple[str, Callable[[Any], bool]]
COUNT: Kind = ("a whole number of at least 0", _is_count)
NUMBER: Kind = ("a number", _is_number)
SPAN: Kind = ("a finite number of at least 0", _is_span)
TEXT: Kind = ("a text", lambda value: isinstance(value, str))
FLAG: Kind = ("true or false", lambda value: isinstance(value, bool))
WHOLE: Kind = ("a whole number", lambda value: isinstance(value, int))
NUMBERS: Kind = (
    "a list of numbers",
    lambda value: isinstance(value, list) and all(map(_is_number, value)),
)

TEXTS: Kind = (
    "a list of texts",
    lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
)
# For each event the fields that it must have, and those that it may have or leave null.
FIELDS: dict[str, tuple[dict[str, Kind], dict[str, Kind]]] = {
    "published": (
        {"version": COUNT},
        {"iteration": COUNT, "seconds": SPAN, "bytes": COUNT, "device": TEXT},
    ),
    "pushed": (
        {"version": COUNT, "verified": FLAG},
        {
            "seconds": SPAN,
            "how": TEXT,
            "abs_dlogp": NUMBER,
            "abs_dlogp_all": NUMBER,
            "limit": NUMBER,
            "cached_dlogp": NUMBER,
            "cached_disagreement": NUMBER,
            "left_out": NUMBER,
            "route_agreement": NUMBERS,
        },
    ),
    "compared": (
        {"version": COUNT},
        {
            "abs_dlogp": NUMBER,
            "abs_dlogp_all": NUMBER,
            "cached_dlogp": NUMBER,
            "cached_disagreement": NUMBER,
            "left_out": NUMBER,
            "route_agreement": NUMBERS,
        },
    ),
    "examined": (
        {"version": COUNT, "alarms": TEXTS},
        {"rollouts": COUNT, "rows": COUNT, "mismatch": NUMBER, "abs_dlogp": NUMBER},
    ),
    "collected": (
        {"version": COUNT, "collection": COUNT, "rollouts": COUNT, "tokens": COUNT},
        {
            "seconds": SPAN,
            "reward": NUMBER,
            "reward_std": NUMBER,
            "response_length": NUMBER,
            "length_cut": NUMBER,
            "expert_load": NUMBERS,
        },
    ),
    "failed": ({"collection": COUNT, "reason": TEXT}, {}),
    "waited": ({"for": TEXT, "seconds": SPAN}, {}),
    "started": ({"part": TEXT}, {}),
    "died": ({"part": TEXT}, {"status": WHOLE}),
    "ended": ({"part": TEXT}, {"status": WHOLE}),
}


def _events(path: Path, notes: list[str]) -> Iterator[Event]:
    """The events of one file that the report knows, each with the fields it must have."""
    unknown: Counter[str] = Counter()
    for where, event in _lines(path, notes):
        kind = event.get("event")
        _expect(where, event, "event", TEXT)
        _expect(where, event, "time", SPAN)
        if kind not in FIELDS:
            unknown[str(kind)] += 1
            continue
        must, may = FIELDS[str(kind)]
        for name, what in must.items():
            _expect(where, event, name, what)
        for name, what in may.items():
            if event.get(name) is not None:
                _expect(where, event, name, what)
        yield {name: value for name, value in event.items() if value is not None}
    for kind, count in sorted(unknown.items()):
        notes.append(f"{path.name}: {count} events {quoted(kind)} are unknown, and were left out")


def _expect(where: str, event: Event, name: str, kind: Kind) -> None:
    words, fits = kind
    if name not in event or not fits(event[name]):
        got = quoted(event[name]) if name in event else "nothing"
        raise ValueError(f"{where}: expected {words} as {quoted(name)}, got {got}")
