"""Read and check what a run of the loop wrote about itself: its metrics and its events.

A run may still be writing while it is read, and its parts may have been killed. So a line that is
cut off is left out, and a note says so. Any other invalid line is refused, with file and line
number. docs/report.md lists files and fields.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_r3.data.untrusted import read_json
from megatron_r3.replay.words import one_line, quoted

# Values by the number of their step, collection or version.
Curve = dict[float, float]
Event = dict[str, Any]

PARTS = ("trainer", "collector", "supervisor")  # events/PART.jsonl
LAYER = "router mismatch/layer "  # the beginning of a name in metrics.jsonl; a layer number follows


@dataclass(frozen=True)
class Run:
    """What was read from one run directory."""

    name: str  # the directory's name, with more of its path if two runs have the same name
    directory: Path
    metrics: dict[str, Curve]  # by name in metrics.jsonl, without values that are not finite
    events: list[Event]  # of trainer, collector and supervisor, each in the order of its file
    notes: list[str]  # what was left out or was logged twice, for the reader of the report

    def of(self, *kinds: str) -> list[Event]:
        """The events of these kinds, in order."""
        return [event for event in self.events if event["event"] in kinds]

    @property
    def steps(self) -> int:
        """How many steps of training metrics.jsonl has."""
        return len({step for curve in self.metrics.values() for step in curve})


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Read each directory. The names of the runs are the shortest ends of the paths that differ.

    Example: noise/live-0 and fp8/live-0 keep two parts; a/live-0 and b/live-1 become live-0 and
    live-1.

    Raises:
        ValueError: a directory is given twice, is no run, or has an invalid line; the error names
            file and line.
    """
    paths = [directory.resolve() for directory in directories]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return [read_run(path, name) for path, name in zip(paths, names, strict=True)]
    raise ValueError(f"{max(paths, key=paths.count)} is given twice: name each run once")


def read_run(directory: Path, name: str) -> Run:
    """Read one run directory.

    Raises:
        ValueError: as `read_runs`.
    """
    files = [directory / "events" / f"{part}.jsonl" for part in PARTS]
    log = directory / "metrics.jsonl"
    if not any(path.is_file() for path in (log, *files)):
        raise ValueError(
            f"{directory} is no directory of a run: it has neither metrics.jsonl nor "
            "events/*.jsonl; give the [run] directory of a config"
        )
    notes: list[str] = []
    metrics = _metrics(log, notes)
    events = [event for path in files for event in _events(path, notes)]
    if not metrics:
        notes.append("metrics.jsonl has no step yet, so curves over steps are missing")
    return Run(name, directory, metrics, events, notes)


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield for each line its place, "FILE, line N", and its object, but no line that is cut off.

    A missing file has no lines.
    """
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        # What follows the last line end is empty, or a line that is not complete yet.
        last = number == len(lines)
        if last and not line.strip():
            return
        where = f"{path}, line {number}"
        try:
            value = read_json(line, where)
        except ValueError:
            # A part that was killed while it wrote a line (`{"time": 17`) and was started again
            # goes on in a new line. So a line that is cut off may be in the middle of the file.
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


def _metrics(path: Path, notes: list[str]) -> dict[str, Curve]:
    """Every name's values by step. Of a step that was logged twice, the later line counts."""
    steps: dict[int, dict[str, float]] = {}
    again, not_finite = set[int](), Counter[str]()
    for where, line in _lines(path, notes):
        if not all(
            type(value) in (int, float) for value in (line.get("iteration"), *line.values())
        ):
            raise ValueError(f"{where}: expected an iteration and its values, all of them numbers")
        step, values = line.pop("iteration"), line
        for name in values:
            if name.startswith(LAYER) and not re.fullmatch("[0-9]{1,5}", name[len(LAYER) :]):
                raise ValueError(f"{where}: {quoted(name)} does not end in a layer number")
        if step in steps:
            again.add(step)
        steps[step] = values
    if again:
        notes.append(
            f"{len(again)} steps were logged twice ({min(again)} to {max(again)}): the trainer was "
            "restarted and repeated them; the later lines are shown"
        )
    curves: dict[str, Curve] = {}
    for step, values in sorted(steps.items()):
        for name, value in values.items():
            if math.isfinite(value):
                curves.setdefault(name, {})[step] = value
        not_finite.update(name for name, value in values.items() if not math.isfinite(value))
    for name, count in sorted(not_finite.items()):
        shown = one_line(name, 100)
        notes.append(f"{shown} is not finite in {count} steps; its curve leaves these steps out")
    return curves


# The fields that an event must have beside `event`; docs/report.md has those that may be missing.
FIELDS = {
    "published": "time version",
    "pushed": "time version verified",
    "compared": "time version",
    "examined": "time version alarms",
    "collected": "time version collection rollouts tokens",
    "failed": "time collection reason",
    "waited": "time for seconds",
    "started": "time part",
    "died": "time part",
    "ended": "time part",
}


def _events(path: Path, notes: list[str]) -> Iterator[Event]:
    """The events of one file, without kinds that the report does not know."""
    unknown: Counter[str] = Counter()
    for where, line in _lines(path, notes):
        kind = str(line.get("event"))
        if kind not in FIELDS:
            unknown[kind] += 1
        elif missing := {*FIELDS[kind].split()} - line.keys():
            raise ValueError(f"{where}: the event {kind} has no {min(missing)}")
        else:
            yield {name: value for name, value in line.items() if value is not None}
    for kind, count in sorted(unknown.items()):
        notes.append(f"{path.name}: {count} events {quoted(kind)} are unknown, and were left out")
