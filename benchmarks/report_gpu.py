"""What a results file of a GPU says, as the text of docs/gpu.md and of the README's status box.

A file of `benchmarks/results`, for example nvidia-h200-2026-11-25.json, holds records by name. What
a record is, its rows say:

    gate rows      "way" and "us"        benchmarks/kernel.py
    step rows      "way" and "step_ms"   benchmarks/layers.py, slices of models
    training rows  "case"                the steps through pretrain_gpt.py
    the record "steps"                   {step: {"status", "seconds", "reason"}}

Every part may be missing, since a run may be cut short: what is not in the file is not in the text.
A row that was skipped has its reason in "skipped".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.interval import shown
from benchmarks.waits import COPIES, WAITS

Row = Mapping[str, Any]
KERNEL, TE = "kernel", "(c) TE, live"
PACKAGES = {
    "torch": "torch",
    "triton": "Triton",
    "cuda": "CUDA",
    "driver": "driver",
    "transformer_engine": "Transformer Engine",
    "megatron_core": "Megatron",
}


@dataclass(frozen=True)
class GpuRun:
    """One results file of a GPU.

    Attributes:
        name: of the file.
        gpu: as the driver calls it.
        date: for example 2026-11-25.
        records: by name, without the record of the steps.
        steps: status, seconds and reason by step.
    """

    name: str
    gpu: str
    date: str
    records: dict[str, dict[str, Any]]
    steps: dict[str, dict[str, Any]]

    def rows(self, *fields: str) -> Iterator[tuple[str, Row]]:
        """The rows that have these fields, or were skipped in a record that has such rows."""
        for name, record in self.records.items():
            rows = [row for row in record.get("rows") or [] if isinstance(row, dict)]
            of_kind = [row for row in rows if all(field in row for field in fields)]
            for row in rows:
                if of_kind and (row in of_kind or row.get("skipped")):
                    yield name, row

    @property
    def gate(self) -> list[Row]:
        """Times of one call of the gate, in some way, forward or backward."""
        return [row for _, row in self.rows("way", "us")]

    @property
    def layers(self) -> list[tuple[str, Row]]:
        """Times of a step of MoE layers in some way, with the name of the record."""
        return [*self.rows("way", "step_ms")]

    @property
    def training(self) -> list[Row]:
        """What a training through pretrain_gpt.py showed."""
        return [row for _, row in self.rows("case")]


def read_run(path: Path) -> GpuRun | None:
    """The run that a file holds; None for a file of a benchmark on the CPU, NAME-cpu-DATE.json.

    Raises:
        ValueError: the file is no results file, or holds a rehearsal, which is no run on a GPU.
    """
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not a results file: it holds no records by name")
    records = {name: part for name, part in found.items() if isinstance(part, dict)}
    for name, record in {"": found, **records}.items():
        if record.get("rehearsal"):
            place = f"{path}, record {name}" if name else str(path)
            raise ValueError(f"{place}: a rehearsal says nothing of a GPU; remove the file")
    if "-cpu-" in path.name:
        return None
    on_cpu = [name for name, record in records.items() if record.get("device") == "cpu"]
    gpus = {str(record["gpu"]) for record in records.values() if record.get("gpu")}
    date = re.search(r"\d{4}-\d\d-\d\d(?=\.json$)", path.name)
    if on_cpu or len(gpus) != 1 or date is None:
        raise ValueError(
            f"{path}: expected GPU-DATE.json whose records name one GPU, or NAME-cpu-DATE.json; "
            f"it names {sorted(gpus) or 'no GPU'}, and {on_cpu or 'no record'} was run on a CPU"
        )
    steps = {
        name: step
        for name, step in records.pop("steps", {}).items()
        if isinstance(step, dict) and "status" in step
    }
    return GpuRun(path.name, gpus.pop(), date[0], records, steps)


# -- docs/gpu.md


def section(run: GpuRun) -> str:
    """The part of docs/gpu.md about one file."""
    parts = [f"### {run.gpu}, {run.date}", _machine(run), _aims(run), _steps(run)]
    parts += [_training(run), _gate(run), _layers(run), _others(run)]
    return "\n\n".join(part for part in parts if part)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines
    )


def _machine(run: GpuRun) -> str:
    def seen(field: str) -> str:
        # parts of a run may differ: Transformer Engine is compiled while the first of them run
        values = {str(record[field]) for record in run.records.values() if record.get(field)}
        return ", ".join(sorted(values))

    facts = [f"{words} {seen(field)}" for field, words in PACKAGES.items() if seen(field)]
    if run.records and not seen("transformer_engine"):
        facts.append("no Transformer Engine")
    host = [seen("processor"), f"Python {seen('python')}" if seen("python") else ""]
    return (
        f"{', '.join([*filter(None, host), *facts])}.\nRecorded in `benchmarks/results/{run.name}`."
    )


def _steps(run: GpuRun) -> str:
    if not run.steps:
        return "No status of a step is recorded."
    rows = [
        [name, str(step["status"]), _number(step.get("seconds"), 0), str(step.get("reason") or "")]
        for name, step in run.steps.items()
    ]
    return table(["step", "status", "seconds", "reason"], rows)


def _aims(run: GpuRun) -> str:
    """What was measured of the numbers that this project aims at; a missing one is said."""
    rows = [
        ["step with replay and plan, by the live step", "at most 0.97", _plan_of_live(run)],
        ["host waits of such a step in all its MoE layers", "0", _waits(run)],
        [
            "fused gate: time of TE's fused top-k by its own",
            "at least 1.5",
            _times_of(run, _te_by_kernel),
        ],
        [
            "fused gate: time of copies of its bytes by its own",
            "at least 0.7",
            _times_of(run, _of_copies),
        ],
        [
            "routes on the device, bytes for a token and a layer",
            "one for each of its experts",
            _routes(run),
        ],
        [
            "replay under Transformer Engine: as recorded, bitwise",
            "every case",
            _exact_under_te(run),
        ],
    ]
    return table(
        ["what", "aim", "measured"], [[*row[:2], row[2] or "not measured"] for row in rows]
    )


def _agrees(row: Row) -> bool:
    return bool(row.get("agrees", True)) and not row.get("skipped")


def _plan_of_live(run: GpuRun) -> str:
    cells = [
        f"{_ratio(row)} ({_which(name, row)})"
        for name, row in run.layers
        if row.get("way") == "plan" and row.get("beside") == "live" and _agrees(row)
    ]
    return "; ".join(cells)


def _waits(run: GpuRun) -> str:
    live = {
        _which(name, row): row.get(WAITS) for name, row in run.layers if row.get("way") == "live"
    }
    cells = []
    for name, row in run.layers:
        if row.get("way") == "plan" and row.get(WAITS) is not None:
            which = _which(name, row)
            beside = f", live {live[which]}" if live.get(which) is not None else ""
            cells.append(f"{row[WAITS]}{beside} ({which})")
    return "; ".join(cells)


def _which(name: str, row: Row) -> str:
    words = [name, row.get("model"), f"{row['tokens']} tokens" if row.get("tokens") else ""]
    words.append("full recompute" if row.get("recompute") else "no recompute")
    return ", ".join(str(word) for word in words if word)


def _times_of(run: GpuRun, ratio: Callable[[GpuRun, Row], Any]) -> str:
    """The smallest and the largest value of a ratio over all shapes and passes of the kernel."""
    found = [ratio(run, row) for row in run.gate if row.get("way") == KERNEL and _agrees(row)]
    values = sorted(_value(value) for value in found if value is not None)
    return f"{values[0]:.2f} to {values[-1]:.2f}, {len(values)} cases" if values else ""


def _same_case(run: GpuRun, row: Row, way: str) -> Row | None:
    fields = ("model", "tokens", "pass", "dtype")
    for other in run.gate:
        if other.get("way") == way and all(other.get(f) == row.get(f) for f in fields):
            return other
    return None


def _te_by_kernel(run: GpuRun, row: Row) -> Any:
    other = _same_case(run, row, TE)
    if other is None or other.get("skipped"):
        return None
    return _value(other["us"]) / _value(row["us"])


def _of_copies(run: GpuRun, row: Row) -> Any:
    return row.get("of_copies")


def _routes(run: GpuRun) -> str:
    cells = []
    for name, record in run.records.items():
        sizes = record.get("sizes") or {}
        if record.get("route_bytes") and {"layers", "sequence", "batch", "topk"} <= sizes.keys():
            places = sizes["layers"] * sizes["sequence"] * sizes["batch"]
            cells.append(f"{record['route_bytes'] / places:.2f} for top-{sizes['topk']} ({name})")
    return "; ".join(cells)


def _is_te(row: Row) -> bool:
    return str(row.get("spec", "")).lower() in ("te", "transformer_engine", "transformer engine")


def _exact(row: Row) -> bool:
    """Whether all that a training row shows is as it must be; a skipped row shows nothing."""
    shows = [row[name] for name in ("dispatched", "bitwise") if row.get(name) is not None]
    wrong = row.get("error") or row.get("skipped")
    return bool(shows) and not wrong and all(value in (True, 1.0) for value in shows)


def _exact_under_te(run: GpuRun) -> str:
    rows = [row for row in run.training if _is_te(row) and not row.get("skipped")]
    return f"{sum(map(_exact, rows))} of {len(rows)} cases" if rows else ""


def _training(run: GpuRun) -> str:
    rows = []
    for row in run.training:
        why = f"skipped: {row['skipped']}" if row.get("skipped") else str(row.get("error") or "")
        dispatched = _number(row.get("dispatched"), 5)
        bitwise = {True: "yes", False: "**no**"}.get(row.get("bitwise"), "")  # type: ignore[arg-type]
        rows.append([str(row.get("case", "")), str(row.get("spec", "")), dispatched, bitwise, why])
    head = ["training", "spec", "dispatched as recorded", "bitwise", ""]
    return table(head, rows) if rows else ""


def _gate(run: GpuRun) -> str:
    rows = []
    for row in run.gate:
        if row.get("skipped"):
            what = [str(row.get(name, "")) for name in ("model", "tokens", "pass")]
            rows.append([*what, "", "", "", f"skipped: {row['skipped']}"])
        elif row.get("way") == KERNEL:
            what = [str(row.get(name, "")) for name in ("model", "tokens", "pass")]
            us = f"{_value(row['us']):.1f}" + ("" if _agrees(row) else ", **wrong**")
            te = _te_by_kernel(run, row)
            unfused = _same_case(run, row, "(a) unfused")
            ratio = None if unfused is None else _value(unfused["us"]) / _value(row["us"])
            rows.append([*what, us, _number(ratio, 2), _number(te, 2), _cell(row.get("of_copies"))])
    head = ["gate", "tokens", "pass", "us", "unfused / it", "TE's top-k / it", "copies / it"]
    return table(head, rows) if rows else ""


def _layers(run: GpuRun) -> str:
    rows = []
    for name, row in run.layers:
        if row.get("skipped"):
            rows.append([f"{name}, {row.get('case', row.get('way', ''))}", *[""] * 5])
            rows[-1].append(f"skipped: {row['skipped']}")
            continue
        way = f"{row['way']}" + ("" if _agrees(row) else ", **wrong gradients**")
        ratio = f"{_ratio(row)} of {row['beside']}" if row.get("beside") != row["way"] else ""
        counts = [_number(row.get(count), 0) for count in (WAITS, COPIES, "peak_mb")]
        step = f"{_value(row['step_ms']):.2f}"
        rows.append([_which(name, row), way, step, ratio, *counts])
    head = ["layers", "way", "step, ms", "ratio", "host waits", "copies to the host", "peak MB"]
    return table(head, rows) if rows else ""


def _others(run: GpuRun) -> str:
    kinds = (("way", "us"), ("way", "step_ms"), ("case",))
    known = {name for fields in kinds for name, _ in run.rows(*fields)}
    names = [f"`{name}`" for name in run.records if name not in known]
    return f"The file also holds: {', '.join(names)}." if names else ""


def _value(value: Any) -> float:
    return float(value["median"]) if isinstance(value, Mapping) else float(value)


def _number(value: Any, decimals: int) -> str:
    return "" if value is None else f"{_value(value):.{decimals}f}"


def _cell(value: Any) -> str:
    return shown(value) if isinstance(value, Mapping) else _number(value, 2)


def _ratio(row: Row) -> str:
    """The ratio of a step to its neighbour, if its interval is recorded and tells."""
    ratio = row.get("ratio")
    if isinstance(ratio, Mapping):
        return shown(ratio)
    return "not told: no interval is recorded"


# -- the README's status box


def shows(run: GpuRun) -> list[str]:
    """What a run shows to work, in the words of the README's status box."""
    found = []
    if any(row.get("way") == KERNEL and _agrees(row) for row in run.gate):
        found.append("gate kernel")
    if any(_agrees(row) for _, row in run.layers):
        found.append("MoE layers")
    exact = [row for row in run.training if _exact(row)]
    if any(not _is_te(row) for row in exact):
        found.append("training with the local spec")
    if any(_is_te(row) for row in exact):
        found.append(TRAINED_TE)
    return found


TRAINED_TE = "training with Transformer Engine"


def faults(run: GpuRun) -> list[str]:
    """What went wrong in a run: steps that failed or ran out of time, and rows that are wrong."""
    names = [name for name, step in run.steps.items() if step["status"] in ("failed", "timed out")]
    if not all(_agrees(row) for row in run.gate if not row.get("skipped")):
        names.append("gate")
    names += [name for name, row in run.layers if not (_agrees(row) or row.get("skipped"))]
    names += [str(row["case"]) for row in run.training if not (_exact(row) or row.get("skipped"))]
    return [*dict.fromkeys(names)]
