"""The tables of proof/benchmarks/README.md, made from what is recorded in its folder `results`.

    python -m proof.benchmarks.report

A test holds that the page is what this makes of the recorded results, so that it says no more.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proof.benchmarks.interval import shown
from proof.benchmarks.update_ranks import PASSES
from proof.benchmarks.waits import COPIES, GATHERS, PLANS, WAITS

ROOT = Path(__file__).parents[2]


def main(argv: list[str] | None = None) -> int:
    """Write the page."""
    description = str(__doc__).splitlines()[0]
    parser = argparse.ArgumentParser(
        prog="python -m proof.benchmarks.report", description=description
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="of the checkout (default: this)")
    root = parser.parse_args(argv).root
    try:
        page, text = with_tables(root)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if page.read_text() != text:
        page.write_text(text)
        print(f"written: {page}")
    return 0


def with_tables(root: Path) -> tuple[Path, str]:
    """The page, and the text that it should have.

    Args:
        root: of a checkout with the page, and with proof/benchmarks/results.

    Raises:
        ValueError: a results file cannot be taken, or the page has no place for its table.
    """
    page = root / "proof" / "benchmarks" / "README.md"
    text = page.read_text()
    for name, make in TABLES.items():
        recorded = sorted((root / "proof" / "benchmarks" / "results").glob(f"{name}-cpu-*.json"))
        part = make(recorded[-1]) if recorded else "No run is recorded."
        text = filled(text, name, part, page)
    return page, text


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


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines
    )


def dispatch_part(path: Path) -> str:
    """The table of `make bench-dispatch`: a ratio that cannot be told from 1 is not in it."""
    found = recorded_in(path)
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
    found = recorded_in(path)
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
    found = recorded_in(path)
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
    found = recorded_in(path)
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
    found = recorded_in(path)
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
    found = recorded_in(path)
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
    found = recorded_in(path)
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
    found = recorded_in(path)
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


def recorded_in(path: Path) -> dict[str, Any]:
    """What a results file holds.

    Raises:
        ValueError: it is no JSON, or a rehearsal, which measured nothing.
    """
    try:
        found = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: not a results file: {error}") from error
    if found.get("rehearsal"):
        raise ValueError(f"{path}: a rehearsal, which measured nothing")
    return found


def _recorded(found: dict[str, Any], path: Path) -> str:
    return (
        f"Recorded in `results/{path.name}`: {found['processor']} ({found['machine']}), "
        f"{found['cores']} cores,\nload {found['load']} at the start, Python {found['python']}"
    )


TABLES = {
    "dispatch": dispatch_part,
    "update": update_part,
    "clients": clients_part,
    "store": store_part,
    "publish": publish_part,
    "scale": scale_part,
    "balance": balance_part,
    "balance-simulated": balance_simulated_part,
}


if __name__ == "__main__":
    sys.exit(main())
