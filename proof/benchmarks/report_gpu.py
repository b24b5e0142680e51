"""What a results file of a GPU says, as the text of docs/gpu.md and of the README's status box.

A file of `proof/benchmarks/results`, for example nvidia-h200-2026-11-25.json, holds records by
name. What a record is, its rows say:

    gate rows      "way" and "us"        proof/benchmarks/kernel.py
    step rows      "way" and "step_ms"   proof/benchmarks/layers.py, slices of models
    training rows  "row" or "case"       trainings through pretrain_gpt.py, "spec" te or local
    the record "steps"                   {step: {"status", "seconds", "reason"}}

Every part may be missing, since a run may be cut short: what is not in the file is not in the text.
A row that was skipped has its reason in "skipped". A row with "agrees" or "ok" False is wrong. A
ratio is what `Median.record` makes; one without an interval is not shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proof.benchmarks.interval import shown
from proof.benchmarks.waits import COPIES, WAITS

Row = Mapping[str, Any]
KERNEL = "kernel"
RAN_GATE, TRAINED_TE = "gate kernel", "training with Transformer Engine"
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
        about: what all records say of machine and packages.
    """

    name: str
    gpu: str
    date: str
    records: dict[str, dict[str, Any]]
    steps: dict[str, dict[str, Any]]
    about: list[dict[str, Any]]

    def rows(self, *fields: str) -> list[tuple[str, Row]]:
        """Record names and rows of one kind: rows with these fields, and what was skipped there."""
        found = []
        for name, record in self.records.items():
            rows = [row for row in record.get("rows") or [] if isinstance(row, dict)]
            is_kind = [all(field in row for field in fields) for row in rows]
            if any(is_kind):
                found += [
                    (name, row)
                    for row, is_one in zip(rows, is_kind, strict=True)
                    if is_one or row.get("skipped")
                ]
        return found

    @property
    def gate(self) -> list[Row]:
        """Times of one call of the gate, in some way, forward or backward."""
        return [row for _, row in self.rows("way", "us")]

    @property
    def layers(self) -> list[tuple[str, Row]]:
        """Times of a step of MoE layers in some way, with the name of the record."""
        return self.rows("way", "step_ms")

    @property
    def training(self) -> list[Row]:
        """What trainings through pretrain_gpt.py showed; each row has "case" and "spec"."""
        found: list[Row] = [row for _, row in self.rows("case")]
        for name, row in self.rows("row"):
            case = f"{name.removeprefix('training ')}: {row.get('row', '')}"
            found.append({"spec": self.records[name].get("spec", ""), "case": case, **row})
        return found


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
    about = [*records.values()]
    given = records.pop("steps", {})
    within = given.get("steps")
    steps = {
        name: step
        for name, step in (within if isinstance(within, dict) else given).items()
        if isinstance(step, dict) and "status" in step
    }
    return GpuRun(path.name, gpus.pop(), date[0], records, steps, about)


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
        values = {str(record[field]) for record in run.about if record.get(field)}
        return ", ".join(sorted(values))

    facts = [f"{words} {seen(field)}" for field, words in PACKAGES.items() if seen(field)]
    if not seen("transformer_engine"):
        facts.append("no Transformer Engine")
    host = [seen("processor"), f"Python {seen('python')}" if seen("python") else ""]
    where = f"Recorded in `proof/benchmarks/results/{run.name}`."
    return f"{', '.join([*filter(None, host), *facts])}.\n{where}"


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
        ["time of a step with replay and plan, by the live one's", "at most 0.97", _plan(run)],
        ["host waits of such a step in all its layers", "0", _waits(run)],
        ["time of the fused gate, by TE's fused top-k's", "at most 0.67", _gate_by(run, "of_te")],
        [
            "time of the fused gate, by copies' of its bytes",
            "at most 1.43",
            _gate_by(run, "of_copies"),
        ],
        ["routes on the device, bytes for a token and a layer", "top-k", _routes(run)],
        ["trainings under Transformer Engine that are exact", "all", _exact_under_te(run)],
    ]
    return table(
        ["what", "aim", "measured"], [[*row[:2], row[2] or "not measured"] for row in rows]
    )


def _agrees(row: Row) -> bool:
    return bool(row.get("agrees", True) and row.get("ok", True)) and not row.get("skipped")


def _plan(run: GpuRun) -> str:
    cells = [
        f"{_cell(row.get('ratio'))} ({_which(name, row)})"
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


def _gate_by(run: GpuRun, field: str) -> str:
    """The smallest and the largest ratio of the kernel over all shapes and passes."""
    of_kernel = [row for row in run.gate if row.get("way") == KERNEL and _agrees(row)]
    ratios = [row[field] for row in of_kernel if _is_ratio(row.get(field))]
    told = sorted(ratio["median"] for ratio in ratios if ratio["tells"])
    if not told:
        return f"cannot tell in {len(ratios)} cases" if ratios else ""
    others = "" if len(told) == len(ratios) else "; cannot tell in the others"
    return f"{told[0]:.2f} to {told[-1]:.2f} in {len(told)} of {len(ratios)} cases{others}"


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
    """Whether a training row shows all that it must; a skipped row shows nothing.

    A row says so itself in "ok": a live training is a control, whose tokens must not all be
    dispatched as recorded. Without "ok" whatever is there must be exact.
    """
    shows = [row[name] for name in ("dispatched", "bitwise") if row.get(name) is not None]
    if row.get("error") or row.get("skipped"):
        return False
    if "ok" in row:
        return bool(row["ok"])
    return bool(shows) and all(value in (True, 1.0) for value in shows)


def _exact_under_te(run: GpuRun) -> str:
    rows = [row for row in run.training if _is_te(row) and not row.get("skipped")]
    return f"{sum(map(_exact, rows))} of {len(rows)}" if rows else ""


def _training(run: GpuRun) -> str:
    rows = []
    for row in run.training:
        notes = [f"{name} {_cell(ratio)}" for name, ratio in (row.get("ratios") or {}).items()]
        notes += [f"skipped: {row['skipped']}"] if row.get("skipped") else []
        # of an error the last line says most
        notes += str(row["error"]).strip().splitlines()[-1:] if row.get("error") else []
        exact = "" if row.get("skipped") else "yes" if _exact(row) else "**no**"
        bitwise = "" if row.get("bitwise") is None else "yes" if row["bitwise"] else "no"
        dispatched = _number(row.get("dispatched"), 5)
        names = [str(row.get(name, "")) for name in ("case", "spec")]
        rows.append([*names, exact, dispatched, bitwise, "; ".join(notes)])
    head = ["training", "spec", "as it must be", "dispatched as recorded", "bitwise", ""]
    return table(head, rows) if rows else ""


def _gate(run: GpuRun) -> str:
    rows = []
    for row in run.gate:
        if row.get("way") == KERNEL and not row.get("skipped"):
            us = _number(row["us"], 1) + ("" if _agrees(row) else ", **wrong**")
            what = [str(row.get(name, "")) for name in ("model", "tokens", "pass")]
            ratios = [_cell(row.get(name)) for name in ("of_unfused", "of_te", "of_copies")]
            rows.append([*what, us, *ratios])
    head = ["gate", "tokens", "pass", "us", "of unfused", "of TE's top-k", "of copies"]
    return _with_skipped(table(head, rows) if rows else "", run.gate)


def _with_skipped(text: str, rows: Sequence[Row]) -> str:
    """A table, and below it each way or case that was skipped, once with each of its reasons."""
    lines = {
        f"- skipped: {row.get('way') or row.get('case') or 'a case'}: {row['skipped']}": None
        for row in rows
        if row.get("skipped")
    }
    return "\n\n".join(part for part in (text, "\n".join(lines)) if part)


def _layers(run: GpuRun) -> str:
    rows = []
    for name, row in run.layers:
        if row.get("skipped"):
            continue
        way = f"{row['way']}" + ("" if _agrees(row) else ", **wrong gradients**")
        ratio = f"{_cell(row.get('ratio'))} of {row['beside']}" if row.get("beside") else ""
        counts = [_number(row.get(count), 0) for count in (WAITS, COPIES, "peak_mb")]
        step = _number(row["step_ms"], 2)
        rows.append([_which(name, row), way, step, ratio, *counts])
    head = ["layers", "way", "step, ms", "ratio", "host waits", "copies to the host", "peak MB"]
    return _with_skipped(table(head, rows) if rows else "", [row for _, row in run.layers])


def _others(run: GpuRun) -> str:
    kinds = (("way", "us"), ("way", "step_ms"), ("case",), ("row",))
    known = {name for fields in kinds for name, _ in run.rows(*fields)}
    names = [f"`{name}`" for name in run.records if name not in known]
    return f"The file also holds: {', '.join(names)}." if names else ""


def _value(value: Any) -> float:
    return float(value["median"]) if isinstance(value, Mapping) else float(value)


def _number(value: Any, decimals: int) -> str:
    return "" if value is None else f"{_value(value):.{decimals}f}"


def _cell(ratio: Any) -> str:
    """A ratio with its interval; empty for None. One without an interval is not told."""
    if ratio is None:
        return ""
    return shown(ratio) if _is_ratio(ratio) else "no interval recorded"


def _is_ratio(value: Any) -> bool:
    """Whether a value is what `Median.record` makes."""
    fields = {"median", "low", "high", "count", "tells"}
    return isinstance(value, Mapping) and fields <= value.keys()


# -- the README's status box


def shows(run: GpuRun) -> list[str]:
    """What a run shows to work, in the words of the README's status box."""
    found = []
    if any(row.get("way") == KERNEL and _agrees(row) for row in run.gate):
        found.append(RAN_GATE)
    if any(_agrees(row) for _, row in run.layers):
        found.append("MoE layers")
    exact = [row for row in run.training if _exact(row) and row.get("dispatched") == 1.0]
    if any(not _is_te(row) for row in exact):
        found.append("training with the local spec")
    if any(_is_te(row) for row in exact):
        found.append(TRAINED_TE)
    return found


def faults(run: GpuRun) -> list[str]:
    """What went wrong in a run: steps that failed or ran out of time, and rows that are wrong."""
    names = [name for name, step in run.steps.items() if step["status"] in ("failed", "timed out")]
    if not all(_agrees(row) for row in run.gate if not row.get("skipped")):
        names.append("gate")
    names += [name for name, row in run.layers if not (_agrees(row) or row.get("skipped"))]
    names += [str(row["case"]) for row in run.training if not (_exact(row) or row.get("skipped"))]
    return [*dict.fromkeys(names)]
