"""The documents' numbers, made from what is recorded in proof/benchmarks/results.

    python -m proof.benchmarks.report

It writes the lines "run on", "not run on" and "stand-ins" of the README's status box, the section
"What was run" of docs/gpu.md, and the tables of proof/benchmarks/README.md. A test holds that the
documents are what this makes of the recorded results, so that no document says more.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from proof.benchmarks.interval import shown
from proof.benchmarks.report_gpu import (
    RAN_GATE,
    TRAINED_TE,
    GpuRun,
    faults,
    read_run,
    section,
    shows,
    table,
)
from proof.benchmarks.update_ranks import PASSES
from proof.benchmarks.waits import COPIES, GATHERS, PLANS, WAITS

ROOT = Path(__file__).parents[2]
NOTHING = "Nothing was run on a GPU."
COMPARISON = "comparison.json"  # of which proof.comparison.report makes docs/comparison.md


def main(argv: list[str] | None = None) -> int:
    """Write the documents."""
    description = str(__doc__).splitlines()[0]
    parser = argparse.ArgumentParser(
        prog="python -m proof.benchmarks.report", description=description
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="of the checkout (default: this)")
    root = parser.parse_args(argv).root
    try:
        pages = documents(root)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path, text in pages.items():
        if path.read_text() != text:
            path.write_text(text)
            print(f"written: {path}")
    return 0


def documents(root: Path) -> dict[Path, str]:
    """The text that each document should have.

    Args:
        root: of a checkout with the documents, and with proof/benchmarks/results.

    Raises:
        ValueError: a results file cannot be taken, or a document has no place for its part.
    """
    results = sorted((root / "proof" / "benchmarks" / "results").glob("*.json"))
    results = [path for path in results if path.name != COMPARISON]
    runs = [run for run in map(read_run, results) if run is not None]
    runs.sort(key=lambda run: run.date, reverse=True)
    readme, gpu = root / "README.md", root / "docs" / "gpu.md"
    bench = root / "proof" / "benchmarks" / "README.md"
    text = bench.read_text()
    parts = {
        "dispatch": dispatch_part,
        "update": update_part,
        "clients": clients_part,
        "store": store_part,
        "publish": publish_part,
        "scale": scale_part,
        "balance": balance_part,
        "balance-simulated": balance_simulated_part,
    }
    for name, make in parts.items():
        recorded = [path for path in results if path.name.startswith(f"{name}-cpu-")]
        text = filled(text, name, make(recorded[-1]) if recorded else "No run is recorded.", bench)
    return {
        readme: with_status(readme.read_text(), runs, readme),
        gpu: filled(gpu.read_text(), "run", gpu_part(runs), gpu),
        bench: text,
    }


def filled(
    text: str, name: str, part: str, path: Path, maker: str = "proof.benchmarks.report"
) -> str:
    """A document whose lines between two markers are replaced.

    Args:
        text: the document, with `<!-- NAME: made by python -m MAKER -->` and `<!-- NAME: end -->`
            on lines of their own.
        name: of the part.
        part: what stands between the markers.
        path: of the document, for the error.
        maker: the module that makes the part.

    Raises:
        ValueError: the markers are not there, each once and in this order.
    """
    begin = f"<!-- {name}: made by python -m {maker} -->\n"
    end = f"<!-- {name}: end -->\n"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{path}: expected once the line {begin!r}, and {end!r} after it")
    before, after = text.partition(begin)[0], text.partition(end)[2]
    return f"{before}{begin}\n{part}\n\n{end}{after}"


# -- the README's status box


def with_status(text: str, runs: list[GpuRun], path: Path) -> str:
    """The README with the lines of `status`.

    Args:
        text: the README.
        runs: newest first; of several runs on one GPU the newest counts.
        path: of the README, for the error.

    Raises:
        ValueError: one of the lines is not there once.
    """
    for head, cell in status(runs).items():
        line = re.compile(rf"^\| \*\*{head}\*\* \|.*$", re.MULTILINE)
        if len(line.findall(text)) != 1:
            raise ValueError(f"{path}: expected one line that begins with '| **{head}** |'")
        text = line.sub(lambda _, row=f"| **{head}** | {cell} |": row, text)  # type: ignore[misc]
    return text


def status(runs: list[GpuRun]) -> dict[str, str]:
    """The cells of the status box: what was shown to work, what was not run, what replaced it."""
    newest: dict[str, GpuRun] = {}
    for run in runs:
        newest.setdefault(run.gpu, run)
    run_on = (
        "CPU tensors, gloo, Python 3.11 and [3.13](docs/limits.md#systems), local layer spec, "
        "[every layout](docs/fidelity.md); "
        "vLLM 0.30.0, SGLang 0.5.23 and Megatron's own engine (CPU), transformers"
    )
    shown_there: set[str] = set()
    for gpu, run in newest.items():
        works, fails = shows(run), faults(run)
        shown_there.update(works)
        words = [", ".join(works)] if works else []
        words += [f"wrong or not finished: {', '.join(fails)}"] if fails else []
        if words:
            run_on += f"; one [{gpu}](docs/gpu.md), {run.date}: {'; '.join(words)}"
    missing = ["NCCL", "several nodes", "HybridEP"]
    if TRAINED_TE not in shown_there:
        missing.insert(2, "Transformer Engine")
    if not shown_there:
        missing.insert(0, "CUDA")
    not_run_on = f"**{', '.join(missing)}** ([all of it](docs/limits.md#not-run))"
    stand_ins = ["DeepEP", "hybrid models without Mamba layers"]
    if RAN_GATE not in shown_there:
        stand_ins.insert(1, "the gate kernel in Triton's interpreter")
    return {"run on": run_on, "not run on": not_run_on, "stand-ins": "; ".join(stand_ins)}


# -- docs/gpu.md and proof/benchmarks/README.md


def gpu_part(runs: list[GpuRun]) -> str:
    """The section "What was run" of docs/gpu.md."""
    return "\n\n".join(map(section, runs)) or NOTHING


def dispatch_part(path: Path) -> str:
    """The table of `make bench-dispatch`: a ratio that cannot be told from 1 is not in it."""
    found = json.loads(path.read_text())
    rows = [
        [
            str(row["ep"]),
            "full" if row["recompute"] else "none",
            row["mode"],
            *(f"{row[name]:.0f}" for name in (WAITS, COPIES, GATHERS, PLANS)),
            f"{row['step_wall_ms']:.0f}",
            f"{row['step_cpu_ms']:.0f}",
            *(shown(row[name]) if row[name] else "" for name in ("wall_of_live", "cpu_of_live")),
            str(row["rounds"]),
        ]
        for row in found["rows"]
    ]
    head = ["EP", "recompute", "", "host waits", "copies", "metadata", "plan", "wall, ms"]
    head += ["CPU, ms", "wall / live", "CPU / live", "rounds"]
    planning, checking = (
        [row[name] for row in found["rows"] if name in row]
        for name in ("planning_share_of_cpu", "checking_share_of_cpu")
    )
    shares = (
        f"Planning took {min(planning):.1%} to {max(planning):.1%} of the CPU time of a step, the "
        f"check of a step before its update\n{min(checking):.1%} to {max(checking):.1%}."
    )
    return f"{_recorded(found, path)}, CPU tensors and gloo\n\n{table(head, rows)}\n\n{shares}"


def update_part(path: Path) -> str:
    """The table of `make bench-update`: a ratio that cannot be told from 1 is not in it."""
    found = json.loads(path.read_text())
    rows = [
        [
            str(row["ep"]),
            str(row["mini_steps"]),
            row["way"],
            f"{row[PASSES]:.0f}",
            f"{row[WAITS]:.1f}",
            f"{row['collection_wall_ms']:.0f}",
            f"{row['collection_cpu_ms']:.0f}",
            *(
                shown(row[name]) if row[name] else ""
                for name in ("wall_of_sampler", "cpu_of_sampler")
            ),
            str(row["rounds"]),
        ]
        for row in found["rows"]
    ]
    head = ["EP", "mini-steps", "old policy", "passes", "host waits", "wall, ms", "CPU, ms"]
    head += ["wall / sampler", "CPU / sampler", "rounds"]
    return f"{_recorded(found, path)}, CPU tensors and gloo\n\n{table(head, rows)}"


def clients_part(path: Path) -> str:
    """The table of `make bench-clients`: a ratio that cannot be told from 1 is not in it."""
    found = json.loads(path.read_text())
    bytes_of = ("moved_per_token", "gathered_per_token", "held_per_token")
    rows = [
        [
            str(row["ep"]),
            "full" if row["recompute"] else "none",
            row["way"],
            *(f"{row[name]:.0f}" for name in (WAITS, COPIES, GATHERS)),
            *(f"{row[name]:.0f}" for name in bytes_of),
            f"{row['step_wall_ms']:.0f}",
            f"{row['step_cpu_ms']:.0f}",
            *(
                shown(row[name]) if row[name] else ""
                for name in ("wall_of_peer", "cpu_of_peer", "cpu_of_live")
            ),
            str(row["rounds"]),
        ]
        for row in found["rows"]
    ]
    head = ["EP", "recompute", "", "host waits", "copies", "metadata", "moved", "gathered", "held"]
    head += ["wall, ms", "CPU, ms", "wall / peer", "CPU / peer", "CPU / live", "rounds"]
    what = f"CPU tensors and gloo, verl {found['verl']}"
    return f"{_recorded(found, path)}, {what}\n\n{table(head, rows)}"


def store_part(path: Path) -> str:
    """The table of `make bench-store`."""
    found = json.loads(path.read_text())
    rows = [
        [
            row["what"],
            f"{row['gb_per_s']:.3f}",
            f"{row['gb_per_cpu_s']:.3f}",
            "" if row["bytes_per_token"] is None else f"{row['bytes_per_token']:.0f}",
            *(shown(row[name]) if row[name] else "" for name in ("wall_of_base", "cpu_of_base")),
        ]
        for row in found["rows"]
    ]
    head = ["", "GB/s", "GB/s of a core", "bytes/token", "wall / decode", "CPU / decode"]
    rounds = found["rows"][0]["rounds"]
    what = f"{rounds} rounds of {found['tokens']} tokens"
    return f"{_recorded(found, path)}, {what}\n\n{table(head, rows)}"


def scale_part(path: Path) -> str:
    """The table of `make bench-scale`: what was to be shown, and whether it was."""
    found = json.loads(path.read_text())
    rows = [
        [row["what"], f"{row['found']:.4g}", f"{row['most']:g}", "yes" if row["shown"] else "no"]
        for row in found["shown"]
    ]
    base = found["reading"]["nothing"]
    rows += [
        [
            f"CPU time of reading a slice, {name} compared, by nothing compared",
            f"{s / base:.2f}",
            "",
            "",
        ]
        for name, s in found["reading"].items()
        if name != "nothing"
    ]
    rows += [[f"growth: {name}", f"{power:.2f}", "", ""] for name, power in found["growth"].items()]
    return f"{_recorded(found, path)}\n\n{table(['', 'found', 'at most', 'shown'], rows)}"


def publish_part(path: Path) -> str:
    """The table of `make bench-publish`."""
    found = json.loads(path.read_text())
    rows = [
        [
            *(str(row[name]) for name in ("hidden", "layers", "layout")),
            *(f"{row[name] / 1e6:.1f}" for name in ("model", "part", "layer", "memory")),
            f"{row['memory'] / row['layer']:.2f}",
            f"{row['wall_ms']:.0f}",
        ]
        for row in found["rows"]
    ]
    head = ["hidden", "layers", "layout", "model, MB", "part, MB", "layer, MB", "memory, MB"]
    head += ["memory / layer", "wall, ms"]
    what = f"CPU tensors and gloo, {found['rounds']} rounds"
    return f"{_recorded(found, path)}, {what}\n\n{table(head, rows)}"


def balance_part(path: Path) -> str:
    """The table of `make bench-balance`: a ratio that cannot be told from 1 is not in it."""
    found = json.loads(path.read_text())
    rows = [
        [
            row["case"],
            row["way"],
            f"{row['load']:.3f}",
            f"{row['wall_ms']:.0f}",
            f"{row['cpu_ms']:.0f}",
            *(
                shown(row[name]) if row[name] else ""
                for name in ("wall_of_off", "cpu_of_off", "layer_of_off")
            ),
            f"{row['planning_ms']:.2f}",
            *(
                [f"{row['guests']:.1f}", f"{row['bytes'] / 1e6:.2f}", f"{row['waiting_ms']:.1f}"]
                if "guests" in row
                else ["", "", ""]
            ),
            str(row["rounds"]),
        ]
        for row in found["rows"]
    ]
    head = ["case", "slots", "max/mean", "wall, ms", "CPU, ms", "wall / off", "CPU / off"]
    head += ["CPU in MoE layers / off", "planning, ms", "guests", "sent, MB"]
    head += ["held up, ms", "rounds"]
    return f"{_recorded(found, path)}, CPU tensors and gloo\n\n{table(head, rows)}"


def balance_simulated_part(path: Path) -> str:
    """The table of `make bench-balance-simulated`."""
    found = json.loads(path.read_text())
    loads = ["store", "shuffled", "1 slot", "2 slots", "2 slots in a node"]
    rows = [
        [
            row["case"],
            str(row["ep"]),
            *(f"{row[name]:.2f}" for name in loads),
            f"{row['guests']:.2f}",
            f"{row['planning_ms']:.0f}",
        ]
        for row in found["rows"]
    ]
    head = ["simulated", "EP", "store order", *loads[1:], "guests of a rank", "planning, ms"]
    what = f"{found['rollouts']} rollouts, simulated"
    return f"{_recorded(found, path)}, {what}\n\n{table(head, rows)}"


def _recorded(found: dict[str, Any], path: Path) -> str:
    return (
        f"Recorded in `results/{path.name}`: {found['processor']} ({found['machine']}), "
        f"{found['cores']} cores,\nload {found['load']} at the start, Python {found['python']}"
    )


if __name__ == "__main__":
    sys.exit(main())
