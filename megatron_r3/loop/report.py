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
from megatron_r3.replay.words import one_line, quoted

# A value by the number of its step, collection or version. All three count up.
Curve = dict[float, float]
Event = dict[str, Any]

PARTS = ("trainer", "collector", "supervisor")  # events/PART.jsonl
LAYER = "router mismatch/layer "  # before Megatron's number of the layer, in metrics.jsonl


@dataclass(frozen=True)
class Run:
    """What one run directory says.

    Attributes:
        name: the directory's own name, or more of its path where two runs have one name.
        metrics: each name of metrics.jsonl, by step. A value that is not finite is left out.
        events: those of trainer, collector and supervisor, each in the order of its file.
        notes: what was left out or came twice, for the reader of the report.
    """

    name: str
    directory: Path
    metrics: dict[str, Curve]
    events: list[Event]
    notes: list[str] = field(default_factory=list)

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
    return Run(name, directory, metrics, events, notes)


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
    again, not_finite = set[int](), Counter[str]()
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
            again.add(step)
        steps[step] = line
    if again:
        notes.append(
            f"{len(again)} steps were logged twice ({min(again)} to {max(again)}): the trainer was "
            "started again; the later lines are shown"
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


def _is_list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


# What a field must be, in words and as a test, and the names of the fields that must be it.
_KINDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("a text", _is_text, "event device how for part reason"),
    ("a list of texts", _is_list_of(_is_text), "alarms"),
    ("true or false", lambda value: isinstance(value, bool), "verified"),
    ("a whole number", lambda value: isinstance(value, int), "status"),
    (
        "a whole number of at least 0",
        _is_count,
        "version iteration bytes rollouts rows collection tokens",
    ),
    (
        "a finite number of at least 0",
        lambda value: _is_number(value) and value >= 0 and math.isfinite(value),
        "time seconds",
    ),
    (
        "a number",
        _is_number,
        "abs_dlogp abs_dlogp_all limit cached_dlogp cached_disagreement left_out mismatch "
        "reward reward_std response_length length_cut",
    ),
    ("a list of numbers", _is_list_of(_is_number), "route_agreement expert_load"),
)
_KIND_OF = {name: (words, fits) for words, fits, names in _KINDS for name in names.split()}
_COMPARED = (
    "abs_dlogp abs_dlogp_all cached_dlogp cached_disagreement left_out route_agreement".split()
)
# For each event the fields that it must have, and those that it may have or leave null.
FIELDS: dict[str, tuple[list[str], list[str]]] = {
    "published": (["version"], ["iteration", "seconds", "bytes", "device"]),
    "pushed": (["version", "verified"], ["seconds", "how", "limit", *_COMPARED]),
    "compared": (["version"], _COMPARED),
    "examined": (["version", "alarms"], ["rollouts", "rows", "mismatch", "abs_dlogp"]),
    "collected": (
        ["version", "collection", "rollouts", "tokens"],
        ["seconds", "reward", "reward_std", "response_length", "length_cut", "expert_load"],
    ),
    "failed": (["collection", "reason"], []),
    "waited": (["for", "seconds"], []),
    "started": (["part"], []),
    "died": (["part"], ["status"]),
    "ended": (["part"], ["status"]),
}


def _events(path: Path, notes: list[str]) -> Iterator[Event]:
    """The events of one file that the report knows, each with the fields it must have."""
    unknown: Counter[str] = Counter()
    for where, line in _lines(path, notes):
        event = {name: value for name, value in line.items() if value is not None}
        kind = event.get("event")
        must, may = FIELDS.get(str(kind), ([], []))
        for name in ("event", "time", *must, *(name for name in may if name in event)):
            words, fits = _KIND_OF[name]
            if name not in event or not fits(event[name]):
                got = quoted(line[name]) if name in line else "nothing"
                raise ValueError(f"{where}: expected {words} as {quoted(name)}, got {got}")
        if kind in FIELDS:
            yield event
        else:
            unknown[str(kind)] += 1
    for kind, count in sorted(unknown.items()):
        notes.append(f"{path.name}: {count} events {quoted(kind)} are unknown, and were left out")
